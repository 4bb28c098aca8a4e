"""The programs, and which of their functions is which phase. Their sources stay where they are: none is copied here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.programs import data

SOURCES = "git clone https://github.com/pytorch/examples; git clone https://github.com/karpathy/nanoGPT"
"""Run in a folder of its own: that folder is PROGRAMS."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the stopwatch stands beside, by the names the script gives it. The values are phases (`compare.PHASES`)."""

    last_import: str
    """What the script imports last."""
    functions: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    loaders: dict[str, str] = field(default_factory=dict)
    """A function that trains, and which of its parameters is the loader; or the loader itself, with any value."""
    entries: dict[str, str] = field(default_factory=dict)
    """Functions and constructors of libraries, as the script looks them up."""
    marks: list[str] = field(default_factory=list)
    """Names that are assigned once before the loop, and at the end of every step of it: for a loop without a loader."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program, and how to run it."""

    name: str
    script: str
    runs: list[list[str]]
    """The arguments of each run of the job: more than one where it is resumed."""
    watch: Watch
    prepare: Callable[[Path, Path], None]
    """Puts what it reads into its working folder: given the folder, and that of its sources."""
    needs: tuple[str, ...] = ("torch",)
    ranks: int = 1
    """As many of it are started at once, each in a folder of its own, with `{rank}` in its arguments."""
    results: tuple[str, ...] = ()
    """Files it leaves, which have to be the same whether it is measured or not."""


TORCH = {
    "torch.save": "checkpoint",
    "torch.load": "restore",
    "torch.nn.Module.to": "model",
    "torch.nn.Module.load_state_dict": "restore",
}

MNIST = Program(
    name="mnist",
    script="examples/mnist/main.py",
    runs=[["--epochs", "2", "--save-model"]],
    watch=Watch(
        last_import="StepLR",
        functions={"test": "evaluation"},
        classes={"Net": "model"},
        loaders={"train": "train_loader"},
        entries=TORCH
        | {
            "torchvision.datasets.MNIST": "data",
            "torch.utils.data.DataLoader": "data",
            "torch.optim.Adadelta": "model",
        },
    ),
    prepare=data.mnist,
    needs=("torch", "torchvision"),
    results=("mnist_cnn.pt",),
)

_GPT = [
    "--dataset=words", "--device=cpu", "--dtype=float32", "--eval_iters=5", "--eval_interval=20", "--log_interval=5",
    "--gradient_accumulation_steps=2", "--batch_size=4", "--block_size=64", "--n_layer=4", "--n_head=4",
    "--n_embd=128", "--warmup_iters=10",
]  # fmt: skip
NANOGPT = Program(
    name="nanoGPT",
    script="nanoGPT/train.py",
    runs=[
        [*_GPT, "--max_iters=70", "--lr_decay_iters=300"],
        [*_GPT, "--max_iters=110", "--lr_decay_iters=300", "--init_from=resume"],
    ],
    watch=Watch(
        last_import="GPT",
        functions={"estimate_loss": "evaluation", "get_batch": "get_batch"},
        classes={"GPT": "model"},
        entries=TORCH | {"torch.optim.AdamW": "model", "torch.optim.Optimizer.load_state_dict": "restore"},
        marks=["running_mfu", "iter_num"],
    ),
    prepare=data.words,
    results=("out/ckpt.pt",),
)

DCGAN = Program(
    name="dcgan",
    script="examples/dcgan/main.py",
    runs=[["--dataset", "folder", "--dataroot", "images", "--niter", "2", "--manualSeed", "1", "--batchSize", "16",
           "--ngf", "32", "--ndf", "32", "--workers", "1"]],
    watch=Watch(
        last_import="vutils",
        classes={"Generator": "model", "Discriminator": "model"},
        loaders={"dataloader": ""},
        entries=TORCH
        | {
            "torchvision.datasets.ImageFolder": "data",
            "torch.utils.data.DataLoader": "data",
            "torch.optim.Adam": "model",
        },
    ),
    prepare=data.images,
    needs=("torch", "torchvision"),
    results=("netG_epoch_1.pth", "netD_epoch_1.pth"),
)  # fmt: skip

_IMAGENET = ["imagenet", "-a", "squeezenet1_1", "-b", "8", "-j", "1", "--lr", "0.01", "--seed", "1", "-p", "5"]
_IMAGENET_WATCH = Watch(
    last_import="Subset",
    functions={"validate": "evaluation", "save_checkpoint": "checkpoint"},
    loaders={"train": "train_loader"},
    entries=TORCH
    | {
        "torchvision.models.squeezenet1_1": "model",
        "torchvision.datasets.ImageFolder": "data",
        "torch.utils.data.DataLoader": "data",
        "torch.optim.SGD": "model",
        "torch.distributed.init_process_group": "group",
        "torch.optim.Optimizer.load_state_dict": "restore",
    },
)
IMAGENET = Program(
    name="imagenet",
    script="examples/imagenet/main.py",
    runs=[
        [*_IMAGENET, "--epochs", "2"],
        [*_IMAGENET, "--epochs", "3", "--resume", "checkpoint.pth.tar"],
    ],
    watch=_IMAGENET_WATCH,
    prepare=data.images,
    needs=("torch", "torchvision"),
    results=("checkpoint.pth.tar",),
)

SPAWNED = Program(
    name="imagenet-spawn",
    script="examples/imagenet/main.py",
    runs=[[*_IMAGENET, "--epochs", "1", "--multiprocessing-distributed", "--world-size", "2", "--rank", "{rank}",
           "--dist-backend", "gloo", "--dist-url", "tcp://127.0.0.1:29791"]],
    watch=_IMAGENET_WATCH,
    prepare=data.images,
    needs=("torch", "torchvision"),
    ranks=2,  # whose results are other ones every time: the program seeds only the process that spawns them
)  # fmt: skip

PROGRAMS = [MNIST, NANOGPT, DCGAN, IMAGENET, SPAWNED]
