"""A plain PyTorch loop, made sparse by two lines and stronger by one: RigL with Sup-tickets on digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import suptickets as st

EPOCHS, CYCLE_EPOCHS, BATCH = 30, 4, 64

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]

torch.manual_seed(1)
hidden = [
    nn.Linear(64, 256),
    nn.BatchNorm1d(256),
    nn.ReLU(),
    nn.Linear(256, 256),
    nn.BatchNorm1d(256),
    nn.ReLU(),
]
model = nn.Sequential(*hidden, nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
steps = -(-len(train) // BATCH)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9 * steps, 13 * steps])

network = st.sparsify(model, st.RigL(sparsity=0.95, interval=100), optimizer)
tickets = st.SupTickets(network, EPOCHS * steps, CYCLE_EPOCHS * steps, cycles=3, lr=(0.01, 0.1), keep=True)

for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(BATCH):
        loss = cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def report(name: str, module: nn.Module) -> None:
    """Print accuracy, negative log-likelihood and sparsity of one network."""
    with torch.no_grad():
        logits = module.eval()(x[test])
    weights = [m.weight for m in module.modules() if isinstance(m, nn.Linear)]
    sparsity = 1 - sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights)
    accuracy = (logits.argmax(1) == y[test]).float().mean()
    print(f"{name:<20} {accuracy:>8.2%} {cross_entropy(logits, y[test]):>8.4f} {sparsity:>9.2%}")


print(f"{'':<20} {'accuracy':>8} {'NLL':>8} {'sparsity':>9}")
for number, ticket in enumerate(tickets.tickets, start=1):
    report(f"ticket {number}", ticket)
report("superposed", tickets.ticket())
