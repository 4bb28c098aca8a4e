"""Steps one optimizer for each parameter inside the backward, to save the memory of gradients."""

from stopwatch import watch
from tiny import Points, net
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

model = net()
optimizers = {param: SGD([param], lr=0.01) for param in model.parameters()}


def step_and_clear(param):
    optimizers[param].step()
    optimizers[param].zero_grad()


for param in model.parameters():
    param.register_post_accumulate_grad_hook(step_and_clear)
for _ in range(2):
    for x, y in watch.waits(DataLoader(Points(400), batch_size=8, shuffle=True)):
        with watch("effective"):
            cross_entropy(model(x), y).backward()
