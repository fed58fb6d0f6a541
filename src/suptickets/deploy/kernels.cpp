// Sparse convolutions on a CPU, and the few operations around them.
//
// A tensor is stored as planes, one per channel: rows of pixels with a float per lane (image of a batch).
// Between the rows and around the plane there are zeros, as wide as the padding that its readers need.
// So the pixels of a plane are one run of memory, and a tap of a convolution (a weight at a place of its
// kernel) reads the same run, moved by an offset: a sparse convolution is a sum of moved runs. What lies
// between the rows is computed too, and set to zero by a mask when the run is written.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {
// Floats in a register, and registers that sum a tile of one of two outputs.
#if defined(__AVX512F__)
constexpr int64_t VECTOR = 16, LONGEST = 8;
#elif defined(__AVX__)
constexpr int64_t VECTOR = 8, LONGEST = 6;
#else
constexpr int64_t VECTOR = 4, LONGEST = 6;
#endif
constexpr int64_t PARTS = 8;  // about so many items of a step for each thread
constexpr int64_t SHORT = VECTOR / 2;  // floats of a vector for short runs, which a longer one helps little

template <int N>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * N), aligned(4), may_alias));
  typedef int32_t Bits __attribute__((vector_size(4 * N), aligned(4), may_alias));
};

template <int N> using Floats = typename Vectors<N>::Floats;
template <int N> using Bits = typename Vectors<N>::Bits;

struct Planes {       // all in floats
  int64_t at;         // where the first pixel of the first channel is
  int64_t channels, height, width;
  int64_t row, step;  // from row to row, from channel to channel
  int64_t lead;       // zeros before the first pixel
};

struct Tap {
  float value;
  int32_t offset;
};

enum Kind : int64_t { PACK, SPARSE, SPLIT, MAX, MEAN, UNPACK };

struct Step {
  Kind kind;
  Planes x, y;
  int64_t port;  // PACK, UNPACK: which of the inputs or outputs
  // SPARSE: for each block of input channels and each pair of outputs, where the taps start that both have
  // (one of the first, one of the second, and so on), those of the first alone, those of the second alone.
  const Tap* taps;
  const int32_t* starts;
  const float* bias;
  const int32_t* mask;  // of a run: -1 where there is a pixel
  int64_t blocks, residual, relu;  // residual: where planes like y are, or -1
  // MAX, MEAN: the window; SPLIT: strides, and the first pixel as negative padding.
  int64_t kernel[2], stride[2], padding[2];
};

struct Call {
  const Step* steps;
  int64_t count, lanes, images;  // images: how many of the lanes are in use
  float* arena;
  const float* const* inputs;
  float* const* outputs;
  int64_t threads;
};

int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t pairs_of(const Step& s) { return divided(s.y.channels, 2); }
int64_t run_of(const Planes& p, int64_t lanes) { return (p.height - 1) * p.row + p.width * lanes; }

// ---- sparse convolution: tiles of a run times chunks of the outputs ----

template <int N, int T>
inline void add_taps(Floats<N>* sums, const Tap* tap, const Tap* end, const float* x) {
  // Fewer than about six sums would wait for each other: short tiles take several taps at once.
  constexpr int AT_ONCE = T == 1 ? 4 : T <= 3 ? 2 : 1;
  if (AT_ONCE > 1) {
    Floats<N> more[AT_ONCE][T] = {};
    for (; end - tap >= AT_ONCE; tap += AT_ONCE)
      for (int u = 0; u < AT_ONCE; u++)
        for (int t = 0; t < T; t++)
          more[u][t] += tap[u].value * *(const Floats<N>*)(x + tap[u].offset + t * N);
    for (int u = 0; u < AT_ONCE; u++)
      for (int t = 0; t < T; t++) sums[t] += more[u][t];
  }
  for (; tap < end; tap++) {
    const Floats<N>* moved = (const Floats<N>*)(x + tap->offset);
    const Floats<N> value = tap->value - Floats<N>{};
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) sums[t] += value * moved[t];
  }
}

// The taps that both outputs have: `volatile` makes sure that what is read is read once for both.
template <int N, int T>
inline void add_shared(Floats<N>* one, Floats<N>* two, const Tap* tap, const Tap* end, const float* x) {
  for (; tap < end; tap += 2) {
    const volatile Floats<N>* moved = (const volatile Floats<N>*)(x + tap->offset);
    const Floats<N> first = tap[0].value - Floats<N>{}, second = tap[1].value - Floats<N>{};
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      const Floats<N> read = moved[t];
      one[t] += first * read;
      two[t] += second * read;
    }
  }
}

template <int N, int T>
inline void begin(Floats<N>* sums, bool first, const float* y, float bias) {
  for (int t = 0; t < T; t++) sums[t] = first ? bias - Floats<N>{} : ((const Floats<N>*)y)[t];
}

template <int N, int T>
inline void finish(Floats<N>* sums,
                   bool last, const Step& s, float* y, const float* other, const int32_t* mask) {
  for (int t = 0; t < T; t++) {
    if (last) {
      if (s.residual >= 0) sums[t] += ((const Floats<N>*)other)[t];
      if (s.relu) sums[t] = sums[t] < 0 ? Floats<N>{} : sums[t];
      sums[t] = (Floats<N>)((Bits<N>)sums[t] & ((const Bits<N>*)mask)[t]);
    }
    ((Floats<N>*)y)[t] = sums[t];
  }
}

// The taps come in blocks of input channels whose tiles stay in the nearest cache for all outputs. The second
// output of the last pair may be one too many: there is memory for it that nobody reads.
template <int N, int T>
void tile(const Step& s, float* arena, int64_t from, int64_t first, int64_t last) {
  Floats<N> one[T], two[T];
  const float* x = arena + s.x.at + from;
  const int32_t* mask = s.mask + from;
  for (int64_t b = 0; b < s.blocks; b++)
    for (int64_t pair = first; pair < last; pair++) {
      const int32_t* starts = s.starts + b * (3 * pairs_of(s) + 1) + 3 * pair;
      const Tap *both = s.taps + starts[0], *ones = s.taps + starts[1], *twos = s.taps + starts[2];
      float *y = arena + s.y.at + 2 * pair * s.y.step + from, *z = y + s.y.step;
      const float* other = arena + s.residual + 2 * pair * s.y.step + from;
      begin<N, T>(one, b == 0, y, s.bias[2 * pair]);
      begin<N, T>(two, b == 0, z, s.bias[2 * pair + 1]);
      add_shared<N, T>(one, two, both, ones, x);
      add_taps<N, T>(one, ones, twos, x);
      add_taps<N, T>(two, twos, s.taps + starts[3], x);
      finish<N, T>(one, b == s.blocks - 1, s, y, other, mask);
      finish<N, T>(two, b == s.blocks - 1, s, z, other + s.y.step, mask);
    }
}

template <int N, int... T>
auto tile_of(int64_t vectors, std::integer_sequence<int, T...>) {
  static constexpr decltype(&tile<N, 1>) table[] = {tile<N, T + 1>...};
  return table[vectors - 1];
}

struct Parts {  // the items of a SPARSE step
  int64_t length, vectors, tiles, chunks;

  Parts(const Call& c, const Step& s) {
    const int64_t run = run_of(s.y, c.lanes);
    length = run <= 3 * SHORT ? SHORT : VECTOR;
    vectors = divided(run, length);
    tiles = divided(vectors, LONGEST);
    chunks = c.threads == 1 ? 1 : std::min(divided(PARTS * c.threads, tiles), divided(pairs_of(s), 4));
  }
};

void clear(float* from, float* to) {
  if (from < to) std::memset(from, 0, (to - from) * sizeof(float));
}

// The zeros before and behind the run of a channel.
void frame(const Planes& p, float* arena, int64_t channel, int64_t length) {
  float* first = arena + p.at + channel * p.step;
  clear(first - p.lead, first);
  clear(first + length, first + p.step - p.lead);
}

void sparse(const Call& c, const Step& s, int64_t item) {
  const Parts p(c, s);
  const int64_t tile = item / p.chunks, chunk = item % p.chunks, pairs = pairs_of(s);
  const int64_t begin = p.vectors * tile / p.tiles, end = p.vectors * (tile + 1) / p.tiles;
  const int64_t first = pairs * chunk / p.chunks, last = pairs * (chunk + 1) / p.chunks;
  constexpr std::make_integer_sequence<int, LONGEST> lengths;
  const int64_t size = end - begin;
  const auto sum = p.length == VECTOR ? tile_of<VECTOR>(size, lengths) : tile_of<SHORT>(size, lengths);
  sum(s, c.arena, begin * p.length, first, last);
  if (tile == 0)
    for (int64_t o = 2 * first; o < 2 * last; o++) frame(s.y, c.arena, o, p.vectors * p.length);
}

// ---- the other steps, channel by channel ----

// Zeros where y has no pixels: around its rows.
void blank(const Call& c, const Planes& y, int64_t channel) {
  frame(y, c.arena, channel, run_of(y, c.lanes));
  float* first = c.arena + y.at + channel * y.step;
  for (float* row = first; row < first + (y.height - 1) * y.row; row += y.row)
    clear(row + y.width * c.lanes, row + y.row);
}

// Copies between planes and a batch as torch has it, image by image.
void exchange(const Call& c, const Step& s, int64_t channel) {
  const bool in = s.kind == PACK;
  const Planes& p = in ? s.y : s.x;
  float* plane = c.arena + p.at + channel * p.step;
  for (int64_t i = 0; i < p.height; i++)
    for (int64_t j = 0; j < p.width; j++)
      for (int64_t l = 0; l < (in ? c.lanes : c.images); l++) {
        const int64_t there = ((l * p.channels + channel) * p.height + i) * p.width + j;
        float& here = plane[i * p.row + j * c.lanes + l];
        if (in) here = l < c.images ? c.inputs[s.port][there] : 0;
        else c.outputs[s.port][there] = here;
      }
  if (in) blank(c, p, channel);
}

// y = f(y, x) for pixels of a row of y and every n-th of a row of x; a stride of 2 is known to the compiler.
template <int LANES, typename F>
void along(float* __restrict y, const float* __restrict x, int64_t pixels, int64_t stride, F f) {
  const auto all = [&](int64_t n) {
    for (int64_t j = 0; j < pixels; j++)
      for (int l = 0; l < LANES; l++) y[j * LANES + l] = f(y[j * LANES + l], x[j * n * LANES + l]);
  };
  stride == 2 ? all(2) : all(stride);
}

// For every row of y and every pixel of the window: f on the pixels of y for which it is inside of x.
template <int LANES, typename F>
void windowed(const Call& c, const Step& s, int64_t channel, float start, F f) {
  const float* x = c.arena + s.x.at + channel * s.x.step;
  for (int64_t i = 0; i < s.y.height; i++) {
    float* y = c.arena + s.y.at + channel * s.y.step + i * s.y.row;
    std::fill_n(y, s.y.width * LANES, start);
    for (int64_t a = 0; a < s.kernel[0]; a++)
      for (int64_t b = 0; b < s.kernel[1]; b++) {
        const int64_t row = i * s.stride[0] + a - s.padding[0], column = b - s.padding[1];
        const int64_t stride = s.stride[1];
        if (row < 0 || row >= s.x.height) continue;
        const int64_t first = column < 0 ? divided(-column, stride) : 0;
        const int64_t last = std::min(s.y.width, divided(s.x.width - column, stride));
        const float* from = x + row * s.x.row + (first * stride + column) * LANES;
        if (first < last) along<LANES>(y + first * LANES, from, last - first, stride, f);
      }
  }
}

template <int LANES>
void window(const Call& c, const Step& s, int64_t channel) {
  if (s.kind == SPLIT) windowed<LANES>(c, s, channel, 0, [](float, float x) { return x; });
  if (s.kind == MEAN) {
    const float share = 1.0f / (s.kernel[0] * s.kernel[1]);
    windowed<LANES>(c, s, channel, 0, [share](float y, float x) { return y + x * share; });
  }
  if (s.kind == MAX) {
    const float least = s.relu ? 0 : -std::numeric_limits<float>::infinity();
    windowed<LANES>(c, s, channel, least, [](float y, float x) { return y < x || x != x ? x : y; });
  }
  blank(c, s.y, channel);
}

void windows(const Call& c, const Step& s, int64_t channel) {
  const auto one = c.lanes == 1 ? window<1> : c.lanes == 2 ? window<2> : c.lanes == 4 ? window<4> : window<8>;
  one(c, s, channel);
}

// ---- a call: steps one after another, each cut into items that any free thread takes ----

int64_t channels_of(const Step& s) { return s.kind == UNPACK ? s.x.channels : s.y.channels; }

int64_t items(const Call& c, const Step& s) {
  if (s.kind != SPARSE) return c.threads == 1 ? 1 : std::min(channels_of(s), PARTS * c.threads);
  const Parts p(c, s);
  return p.tiles * p.chunks;
}

void work(const Call& c, const Step& s, int64_t item) {
  if (s.kind == SPARSE) return sparse(c, s, item);
  const auto each = s.kind == PACK || s.kind == UNPACK ? exchange : windows;
  const int64_t channels = channels_of(s), parts = items(c, s);
  for (int64_t k = channels * item / parts; k < channels * (item + 1) / parts; k++) each(c, s, k);
}

void alone(Call c, float* arena) {
  c.threads = 1, c.arena = arena;
  for (const Step* s = c.steps; s < c.steps + c.count; s++)
    for (int64_t i = 0; i < items(c, *s); i++) work(c, *s, i);
}

// Stages one after another, each of items that are dealt out: a thread begins with its own, which lie where
// it wrote in the stage before, then helps others. A thread that comes late finds all items taken and touches
// nothing of the calls, which may be over by then.
class Job {
 public:
  Job(const Call* calls, int64_t count, int64_t threads)
      : calls(calls), together(count == 1), threads(threads) {
    if (!together) stages.emplace_back(count, threads);
    for (int64_t k = 0; together && k < calls->count; k++)
      stages.emplace_back(items(*calls, calls->steps[k]), threads);
  }

  void help() {
    const int64_t own = joined.fetch_add(1);
    for (size_t k = 0; k < stages.size(); k++) {
      Stage& stage = stages[k];
      for (int64_t t = own; t < own + threads; t++) take(k, t % threads, own);
      while (stage.done.load() < stage.items) std::this_thread::yield();
    }
  }

 private:
  struct Stage {
    const int64_t items;
    std::atomic<int64_t> done{0};
    std::vector<std::atomic<int64_t>> taken;  // how many of each thread's items

    Stage(int64_t items, int64_t threads) : items(items), taken(threads) {}
  };

  void take(size_t k, int64_t thread, int64_t own) {
    Stage& stage = stages[k];
    const int64_t first = stage.items * thread / threads, last = stage.items * (thread + 1) / threads;
    for (int64_t i; (i = first + stage.taken[thread].fetch_add(1)) < last; stage.done.fetch_add(1))
      together ? work(*calls, calls->steps[k], i) : alone(calls[i], calls[own].arena);
  }

  const Call* calls;
  const bool together;  // all threads work on one call, by steps; otherwise each on whole ones, in its arena
  const int64_t threads;
  std::atomic<int64_t> joined{0};
  std::deque<Stage> stages;
};

// Threads that wait for jobs. A forked process has none of its parent's and gets a pool of its own.
class Pool {
 public:
  static Pool& own() {
    static std::mutex guard;
    static Pool* pool = nullptr;
    std::lock_guard<std::mutex> lock(guard);
    if (!pool || pool->process != getpid()) pool = new Pool;  // never freed: its threads outlive main
    return *pool;
  }

  void share(const std::shared_ptr<Job>& job, int64_t helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (; threads < helpers; threads++) try {
          std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
          break;
        }
      for (int64_t k = 0; k < std::min(helpers, threads); k++) jobs.push_back(job);
    }
    ready.notify_all();
  }

 private:
  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      ready.wait(lock, [this] { return !jobs.empty(); });
      const std::shared_ptr<Job> job = jobs.front();
      jobs.pop_front();
      lock.unlock();
      job->help();
    }
  }

  const pid_t process = getpid();
  int64_t threads = 0;
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<std::shared_ptr<Job>> jobs;
};

}  // namespace

extern "C" int64_t suptickets_tile() { return VECTOR * LONGEST; }
extern "C" void suptickets_run(const Call* calls, int64_t count, int64_t threads) {
  const auto job = std::make_shared<Job>(calls, count, threads);
  if (threads > 1) Pool::own().share(job, threads - 1);
  job->help();
}
