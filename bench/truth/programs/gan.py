"""A GAN with two optimizers; the critic makes five steps for each of the generator's, or one."""

import sys

import torch
from stopwatch import watch
from tiny import Points, net
from torch import nn
from torch.utils.data import DataLoader

critic_steps = int(sys.argv[1])
generator, critic = nn.Linear(4, 8), net(0.02)
to_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.9))
to_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
for number, (real, _) in enumerate(watch.waits(DataLoader(Points(640, delay_s=0.001), batch_size=8)), 1):
    with watch("effective"):
        fake = generator(torch.randn(8, 4))
        to_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        to_critic.step()
        if number % critic_steps == 0:
            to_generator.zero_grad()
            critic.eval()
            (-critic(fake).mean()).backward()
            critic.train()
            to_generator.step()
