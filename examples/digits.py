"""A plain PyTorch loop, made sparse by one line and given Sup-tickets by another: RigL on digits.

The test set is small and this is one seed: compare the superposed network with the mean of its tickets.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import suptickets as st

EPOCHS, CYCLE_EPOCHS, BATCH = 30, 4, 64

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]

torch.manual_seed(1)
first = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU()]
second = [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
model = nn.Sequential(*first, *second, nn.Linear(256, 10))
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
    if network.step == tickets.start:
        before = network.densify()  # a plain copy, to compare with


def scores(module: nn.Module) -> Tensor:
    """Accuracy, negative log-likelihood and sparsity of one network."""
    with torch.no_grad():
        logits = module.eval()(x[test])
    weights = torch.cat([m.weight.flatten() for m in module.modules() if isinstance(m, nn.Linear)])
    accuracy = (logits.argmax(1) == y[test]).float().mean()
    return torch.stack([accuracy, cross_entropy(logits, y[test]), (weights == 0).float().mean()])


single = [scores(ticket) for ticket in tickets.tickets]
rows = {"before the cycles": scores(before)} | {f"ticket {i}": row for i, row in enumerate(single, start=1)}
rows |= {"mean of the tickets": torch.stack(single).mean(0), "superposed": scores(tickets.ticket())}
print(f"{'':<20} {'accuracy':>8} {'NLL':>8} {'sparsity':>9}")
for name, (accuracy, nll, sparsity) in rows.items():
    print(f"{name:<20} {accuracy:>8.2%} {nll:>8.4f} {sparsity:>9.2%}")
