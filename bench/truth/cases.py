"""The cases: commands whose truth is known, and what each of them tests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One job."""

    name: str
    command: str
    """Run in a folder that holds the programs. With `shell`, by bash; else split into words."""
    topic: str
    tests: str
    shell: bool = False
    failures: int | None = 0
    """Attempts that did not end well; None where it is a matter of taste."""
    attempts: int | None = 1
    """None where it is a matter of taste how many there were."""
    slow_rank: int | None = None
    """The rank that holds the job up, where that is the point."""
    fails: bool = False
    """The last attempt fails."""
    exit_code: int = 0
    prepare: str = ""
    """A command that is run before, and not measured."""
    again: str = ""
    """A second command of the same job, under a `headway exec` of its own."""
    needs: tuple[str, ...] = ()
    """Modules it imports besides torch."""


PASSES = "passes that do not train"
NO_LOADER = "evaluation without a loader"
ONE_PROCESS = "several trainings in one process"
ONE_COMMAND = "several trainings in one command"
RL = "reinforcement learning"
RESUME = "resume"
SIDE_BY_SIDE = "trainings side by side"
SECOND_MODEL = "a second model"
EXEC = "exec"
RANKS = "ranks"
FIRST_SECONDS = "the first seconds"
LOST = "lost work"
DATA = "data"
ENDS = "ends"
LOOPS = "loops"
FRAMEWORKS = "frameworks"
LAUNCHERS = "launchers"

_EVALUATED = "The model is evaluated by hand every 15 steps"
_RETRY = "until python resume.py {}; do sleep 0.3; done"
_RESUMED = "Killed and started again; the checkpoint is "
_TERMINATED = (
    "python ends.py sigterm 180 & while [ ! -e last.pt ]; do sleep 0.1; done; sleep 1.5; kill -TERM $!; wait $!"
)
_TORCHRUN = "torchrun --standalone --nproc-per-node 2"


def _resumed(name: str, arguments: str, checkpoint: str) -> Case:
    """A job that crashes once and goes on."""
    command = _RETRY.format(arguments)
    return Case(f"resume-{name}", command, RESUME, f"{_RESUMED}{checkpoint}.", shell=True, failures=1, attempts=2)


CASES = [
    Case("train-accuracy", "python train_accuracy.py no_grad", PASSES,
         "The training loader is read under no_grad after each epoch."),
    Case("train-accuracy-eval", "python train_accuracy.py eval", PASSES, "The same in evaluation mode."),
    Case("train-accuracy-inference", "python train_accuracy.py inference_mode", PASSES, "The same in inference mode."),
    Case("train-accuracy-decorated", "python train_accuracy.py decorator", PASSES, "The same in a decorated function."),
    Case("update-bn", "python update_bn.py each", PASSES, "update_bn reads the training loader after each epoch."),
    Case("update-bn-last", "python update_bn.py last", PASSES, "update_bn reads the training loader at the end."),
    Case("open-validation", "python open_validation.py no_grad", PASSES,
         "A validation iterator stays open and gives 10 batches every 10 steps."),
    Case("open-validation-eval", "python open_validation.py eval", PASSES, "The same in evaluation mode."),
    #
    Case("eval-context", "python eval_by_hand.py context 20", NO_LOADER, f"{_EVALUATED}: eval(), no_grad, train()."),
    Case("eval-inference", "python eval_by_hand.py inference_mode 20", NO_LOADER, f"{_EVALUATED} in inference mode."),
    Case("eval-decorator", "python eval_by_hand.py decorator 20", NO_LOADER, f"{_EVALUATED} in a decorated function."),
    Case("eval-grad-first", "python eval_by_hand.py grad_first 20", NO_LOADER, f"{_EVALUATED}: eval() inside no_grad."),
    Case("eval-set-grad", "python eval_by_hand.py set_grad_enabled 20", NO_LOADER, f"{_EVALUATED}: set_grad_enabled."),
    Case("eval-no-grad-only", "python eval_by_hand.py no_grad_only 20", NO_LOADER, f"{_EVALUATED} under no_grad."),
    Case("eval-long", "python eval_by_hand.py context 50", NO_LOADER, f"{_EVALUATED} for 1.5 s: no stall."),
    Case("eval-short", "python eval_by_hand.py context 3", NO_LOADER, f"{_EVALUATED} for 90 ms."),
    #
    Case("kfold-adam", "python kfold.py Adam -", ONE_PROCESS, "Three folds, each with a fresh Adam."),
    Case("kfold-sgd", "python kfold.py SGD -", ONE_PROCESS, "Three folds, each with a fresh SGD."),
    Case("kfold-init", "python kfold.py SGD init", ONE_PROCESS, "Each fold loads the weights saved at the start."),
    Case("kfold-init-adam", "python kfold.py Adam init", ONE_PROCESS, "The same with Adam."),
    Case("kfold-published", "python kfold.py Adam published", ONE_PROCESS, "Each fold loads published weights.",
         prepare="python pretrained.py --publish"),
    Case("kfold-ensemble", "python kfold.py Adam ensemble", ONE_PROCESS,
         "The same, and all models and optimizers are kept.", prepare="python pretrained.py --publish"),
    Case("kfold-best", "python kfold.py Adam best", ONE_PROCESS, "Each fold loads its best weights for its test."),
    Case("lightning-kept", "python lightning_fit.py 3 keep", ONE_PROCESS,
         "Lightning fits and saves three models, and loads each.", needs=("lightning",)),
    Case("lightning-thrice", "python lightning_fit.py 3", ONE_PROCESS, "Lightning fits three models.",
         needs=("lightning",)),
    Case("pretrained", "python pretrained.py", ONE_PROCESS, "Published weights are loaded between two trainings.",
         prepare="python pretrained.py --publish"),
    Case("rollback", "python rollback.py file SGD", ONE_PROCESS, "Back to its own checkpoint, with a new loader."),
    Case("rollback-adam", "python rollback.py file Adam", ONE_PROCESS, "The same with Adam."),
    Case("rollback-model", "python rollback.py model Adam", ONE_PROCESS, "The same; the optimizer is left as it is."),
    Case("rollback-loop", "python rollback.py loop SGD", ONE_PROCESS, "The same inside one loop with a new iterator."),
    Case("rollback-loop-adam", "python rollback.py loop Adam", ONE_PROCESS, "The same with Adam."),
    Case("rollback-memory", "python rollback.py memory SGD", ONE_PROCESS, "The same, with the checkpoint in memory."),
    Case("search", "python search.py loader", ONE_PROCESS, "Four trials of a search, each with a fresh model."),
    Case("search-tensors", "python search.py tensors", ONE_PROCESS, "The same without a loader."),
    Case("called-twice", "python search.py twice", ONE_PROCESS, "A function that trains is called twice."),
    #
    Case("sweep-lr", "for lr in 0.1 0.01 0.001; do python train.py --lr $lr --steps 50; done", ONE_COMMAND,
         "Three learning rates, one after the other.", shell=True, attempts=None),
    Case("sweep-seeds", "for seed in 1 2; do python train.py --seed $seed --out model$seed.pt; done", ONE_COMMAND,
         "Two seeds, one after the other, each saved.", shell=True, attempts=None),
    Case("pretrain-finetune", "python train.py --out base.pt && python finetune.py", ONE_COMMAND,
         "A second script fine-tunes what the first has saved.", shell=True, attempts=None),
    Case("two-stages", "python train.py --out base.pt && python train.py --init base.pt --lr 0.001 --out final.pt",
         ONE_COMMAND, "The same script with other arguments fine-tunes what it has saved.", shell=True, attempts=None),
    Case("sweep-xargs", "echo 0.1 0.01 | xargs -n 1 python train.py --lr", ONE_COMMAND, "A sweep by xargs.",
         shell=True, attempts=None),
    #
    Case("ppo-few-updates", "python rl.py --updates 1 --rollouts 20 --no-grad", RL, "One update for each rollout."),
    Case("ppo-many-updates", "python rl.py --updates 10 --rollouts 8", RL, "Ten updates for each rollout."),
    Case("ppo-long-rollouts", "python rl.py --updates 10 --rollouts 4 --rollout-s 1.2 --no-grad", RL,
         "Rollouts of 1.5 s are no stalls."),
    Case("ppo-eval-mode", "python rl.py --updates 10 --eval --no-grad", RL,
         "Rollouts with the policy in evaluation mode, without gradients."),
    Case("ppo-eval-only", "python rl.py --updates 4 --eval", RL, "Rollouts in evaluation mode, with gradients."),
    Case("ppo-loader", "python rl.py --updates 5 --no-grad --loader", RL, "The updates use a DataLoader."),
    Case("ppo-loader-eval", "python rl.py --updates 5 --eval --no-grad --loader", RL, "The same, in evaluation mode."),
    Case("ppo-two-rollouts", "python rl.py --updates 10 --rollouts 2 --rollout-s 2 --eval --no-grad", RL,
         "Only two long rollouts."),
    Case("dqn", "python dqn.py", RL, "A replay buffer, an update after each move."),
    Case("dqn-sparse", "python dqn.py --train-every 4 --moves 150", RL, "An update after every fourth move."),
    #
    _resumed("file-sgd", "file SGD", "a file, SGD"),
    _resumed("file-adam", "file Adam", "a file, Adam"),
    _resumed("memory-sgd", "memory SGD", "bytes that are uploaded, SGD"),
    _resumed("memory-adam", "memory Adam", "bytes that are uploaded, Adam"),
    _resumed("copy-sgd", "copy SGD", "a copy of the file, SGD"),
    _resumed("copy-adam", "copy Adam", "a copy of the file, Adam"),
    _resumed("cloud-sgd", "cloud SGD", "uploaded from memory and downloaded to a file, SGD"),
    _resumed("cloud-fused", "cloud fused", "uploaded and downloaded, fused Adam"),
    _resumed("pickle-sgd", "pickle SGD", "pickled, SGD"),
    _resumed("pickle-adam", "pickle Adam", "pickled, Adam"),
    _resumed("numpy-sgd", "numpy SGD", "NumPy arrays of the weights, SGD"),
    _resumed("numpy-adam", "numpy Adam", "NumPy arrays of the weights; Adam starts from nothing"),
    _resumed("dcp", "dcp SGD", "a folder of torch.distributed.checkpoint, SGD"),
    _resumed("fused", "file fused", "a file, fused Adam"),
    _resumed("own-optimizer", "memory Lion", "bytes, and an optimizer that keeps no count"),
    _resumed("raise", "memory SGD --crash raise", "bytes; an exception ends the first attempt"),
    _resumed("exit", "cloud SGD --crash exit", "uploaded and downloaded; sys.exit(1) ends the first attempt"),
    Case("resume-two-jobs", "python resume.py memory SGD", RESUME,
         "The second attempt has a headway exec of its own.", failures=1, attempts=2,
         again="python resume.py memory SGD"),
    #
    Case("hogwild", "python hogwild.py", SIDE_BY_SIDE, "Two processes of multiprocessing train one model."),
    Case("side-by-side", "python train.py --steps 90 & python train.py --steps 90 --seed 1 & wait", SIDE_BY_SIDE,
         "Two independent trainings of the same length.", shell=True, attempts=None),
    Case("side-by-side-uneven", "python train.py --steps 60 & python train.py --steps 150 --seed 1 & wait",
         SIDE_BY_SIDE, "Two independent trainings, one longer.", shell=True, attempts=None),
    #
    Case("teacher", "python distill.py teacher", SECOND_MODEL, "A teacher without gradients in each step."),
    Case("teacher-eval", "python distill.py teacher-each-step", SECOND_MODEL, "teacher.eval() in each step."),
    Case("frozen-backbone", "python distill.py backbone", SECOND_MODEL, "A backbone that stays in evaluation mode."),
    Case("federated", "python federated.py 4", SECOND_MODEL, "Five clients with 4 steps each, six rounds."),
    Case("federated-two", "python federated.py 2", SECOND_MODEL, "Clients with 2 steps each."),
    Case("federated-kept", "python federated.py 2 keep", SECOND_MODEL, "Each client keeps its model and optimizer."),
    Case("federated-kept-four", "python federated.py 4 keep", SECOND_MODEL, "The same with 4 steps each."),
    Case("teacher-fresh", "python distill.py teacher fresh", SECOND_MODEL, "A teacher, and a new loader each epoch."),
    Case("backbone-fresh", "python distill.py backbone fresh", SECOND_MODEL, "The same with a backbone."),
    Case("federated-evaluated", "python federated.py 3 evaluate", SECOND_MODEL, "An evaluation each round."),
    #
    Case("bash-last-exec", "python train.py; python train.py", EXEC, "bash becomes its last command.", shell=True,
         attempts=None),
    Case("execv", "python reexec.py 0", EXEC, "The program replaces itself after each epoch.", attempts=None),
    Case("or-exec", "python ends.py fail 100 || exec python ends.py fail 100", EXEC,
         "The shell becomes the second attempt.", shell=True, failures=1, attempts=2),
    #
    Case("slow-compute-1", f"{_TORCHRUN} ddp.py --slow compute", RANKS, "Rank 1 computes 100 ms longer.", slow_rank=1),
    Case("slow-compute-0", f"{_TORCHRUN} ddp.py --slow compute --slow-rank 0", RANKS, "Rank 0 computes 100 ms longer.",
         slow_rank=0),
    Case("slow-data-1", f"{_TORCHRUN} ddp.py --slow data", RANKS, "Rank 1 waits 100 ms for each batch.", slow_rank=1),
    Case("slow-late-0", f"{_TORCHRUN} ddp.py --slow late --slow-rank 0", RANKS, "Rank 0 is slow after its optimizer.",
         slow_rank=0),
    Case("rank0-evaluates", f"{_TORCHRUN} ddp.py --evaluate rank0", RANKS, "Rank 0 evaluates, the other waits."),
    Case("rank0-evaluates-long", f"{_TORCHRUN} ddp.py --evaluate rank0 --eval-batches 50", RANKS,
         "The same for 1.5 s each time."),
    Case("rank0-evaluates-by-hand", f"{_TORCHRUN} ddp.py --evaluate by-hand --eval-batches 20", RANKS,
         "Rank 0 evaluates without a loader, the other waits."),
    Case("all-evaluate", f"{_TORCHRUN} ddp.py --evaluate all", RANKS, "Both ranks evaluate."),
    #
    Case("dummy-step", "python first_seconds.py dummy", FIRST_SECONDS, "optimizer.step() before 3 s of preparation."),
    Case("dummy-step-zero", "python first_seconds.py dummy-zero", FIRST_SECONDS, "The same with gradients of zero."),
    Case("early-stall", "python first_seconds.py stall", FIRST_SECONDS, "A stall of 3 s in step 7."),
    Case("late-stall", "python train.py --stall-at 40", FIRST_SECONDS, "A stall of 3 s in step 40."),
    #
    Case("lr-finder", "python lr_finder.py", LOST, "Thirty steps are taken back in memory."),
    Case("oom-retry", "python oom_retry.py", LOST, "Every third try runs out of memory after its forward."),
    Case("survives", "python survives.py", LOST, "Every fourth batch raises after its forward, and is left out."),
    Case("shards", "python shards.py", DATA, "torch.load reads shards of data, before and between epochs.",
         prepare="python shards.py --publish"),
    Case("skip-loop", "until python skip_loop.py; do sleep 0.3; done", DATA, "Batches are skipped after a restart.",
         shell=True, failures=1, attempts=2),
    Case("next-iter", "python next_iter.py each", DATA, "next(iter(loader)) in each step."),
    Case("next-restart", "python next_iter.py restart", DATA, "An iterator is made again at StopIteration."),
    #
    Case("hang-timeout", "timeout 15 python ends.py hang 200", ENDS, "A hang in step 70, ended by timeout.",
         failures=1, fails=True, exit_code=124),
    Case("script-returns-1", "python train.py > log; grep -q accuracy log", ENDS,
         "The training is good; the shell's last command returns 1.", shell=True, failures=None, attempts=None,
         exit_code=1),
    Case("crash", "python ends.py fail 200", ENDS, "An exception ends the job at step 50, saved at 40.", failures=1,
         fails=True, exit_code=1),
    Case("crash-unsaved", "python ends.py lose 200", ENDS, "An exception ends the job, and nothing was saved.",
         failures=1, fails=True, exit_code=1),
    Case("sigterm", _TERMINATED, ENDS,
         "SIGTERM: the program saves and ends with 0.", shell=True),
    Case("interrupt", "timeout --preserve-status -s INT 12 python ends.py interrupt 2000", ENDS,
         "Ctrl-C: the program saves and ends with 0."),
    Case("preempted", _TERMINATED, ENDS, "SIGTERM, its work saved, then started again.", shell=True,
         again="python ends.py sigterm 180", attempts=2),
    #
    Case("accumulation", "python accumulate.py plain", LOOPS, "Four batches for each step of the optimizer."),
    Case("scaler", "python accumulate.py scaler", LOOPS, "A gradient scaler that skips every twentieth step."),
    Case("gan", "python gan.py 1", LOOPS, "Two optimizers; the critic is in evaluation mode inside each step."),
    Case("gan-critic", "python gan.py 5", LOOPS, "Five steps of the critic for one of the generator."),
    Case("in-backward", "python in_backward.py", LOOPS, "One optimizer for each parameter, in the backward."),
    Case("lbfgs", "python lbfgs.py", LOOPS, "An optimizer that calls a closure."),
    Case("on-the-fly", "python no_loader.py generate", LOOPS, "Data is generated in the step; the scheduler counts."),
    Case("memmap", "python no_loader.py memmap", LOOPS, "Batches from mapped memory."),
    Case("trainer-class", "python trainer_class.py 9", LOOPS, "A trainer class that validates and saves each epoch."),
    Case("early-stopping", "python trainer_class.py 0", LOOPS, "The same, and it stops early."),
    Case("evaluation-process", "python side_evaluation.py process", LOOPS, "Another process evaluates."),
    Case("ema", "python side_evaluation.py ema", LOOPS, "An averaged model is evaluated."),
    Case("sampling", "python side_evaluation.py sample", LOOPS, "Samples are drawn every 25 steps."),
    Case("thread-save", "python side_evaluation.py thread-save", LOOPS, "A thread writes the checkpoints."),
    Case("curriculum", "python curriculum.py", LOOPS, "A new loader with larger batches for each stage."),
    Case("phases", "python phases.py", LOOPS, "Two phases in each epoch, by set_grad_enabled."),
    Case("validation-first", "python validation.py first", LOOPS, "A validation before the first step."),
    Case("validation-middle", "python validation.py middle", LOOPS, "Validations in the middle of an epoch."),
    Case("validation-last", "python validation.py last", LOOPS, "A test after the last step."),
    Case("upload", "python validation.py upload", LOOPS, "The loop waits until each checkpoint is uploaded."),
    Case("by-hand", "python odd_steps.py by-hand", LOOPS, "Weights are changed by hand, without an optimizer."),
    Case("optimizers-in-turns", "python odd_steps.py turns", LOOPS, "Two optimizers, each for an epoch."),
    Case("unfreeze", "python odd_steps.py unfreeze", LOOPS, "A new optimizer each epoch."),
    Case("train-in-eval-mode", "python odd_steps.py eval-mode", LOOPS, "The model trains in evaluation mode."),
    Case("adversarial", "python odd_steps.py attack", LOOPS, "An attack in evaluation mode inside each step."),
    Case("active-learning", "python pool.py score", PASSES, "A pool is scored between trainings."),
    Case("cached-features", "python pool.py cache", LOOPS, "A frozen model reads the data once before the training."),
    Case("profiler", "python extras.py profiler", LOOPS, "torch.profiler is on."),
    Case("compile", "python extras.py compile", LOOPS, "torch.compile of a small model."),
    Case("gradient-checkpointing", "python extras.py checkpoint", LOOPS, "The backward runs the forward again."),
    Case("cached-dataset", "python extras.py cache", LOOPS, "The dataset is read into memory first, by a loader."),
    #
    Case("workers", "python loaders.py workers", DATA, "Persistent workers that are too slow."),
    Case("fresh-workers", "python loaders.py fresh-workers", DATA, "Workers that start again each epoch."),
    Case("stream", "python loaders.py stream", DATA, "An endless IterableDataset."),
    Case("stateful-loader", "python loaders.py stateful", DATA, "torchdata's loader.", needs=("torchdata",)),
    Case("prefetch-thread", "python loaders.py thread", DATA, "A thread fetches batches, and is too slow."),
    Case("zipped", "python loaders.py zip", DATA, "Two zipped loaders, as for contrastive training."),
    Case("semi-supervised", "python semi_supervised.py", DATA, "Two loaders of different length and speed."),
    #
    Case("lightning-validation", "python lightning_fit.py 1 validate", FRAMEWORKS, "Lightning with validation.",
         needs=("lightning",)),
    Case("lightning-resume", "until python lightning_resume.py; do sleep 0.3; done", FRAMEWORKS,
         "Lightning is killed and goes on by ckpt_path.", shell=True, failures=1, attempts=2, needs=("lightning",)),
    Case("hf-resume", "until python hf_trainer.py resume; do sleep 0.3; done", FRAMEWORKS,
         "Hugging Face Trainer is killed and goes on, and skips the data.", shell=True, failures=1, attempts=2,
         needs=("transformers", "accelerate")),
    Case("hf-trainer", "python hf_trainer.py", FRAMEWORKS, "Hugging Face Trainer with evaluation.",
         needs=("transformers", "accelerate")),
    Case("accelerate", "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no "
         "--dynamo_backend no accelerated.py", FRAMEWORKS, "accelerate launch, evaluation, save_state.",
         needs=("accelerate",)),
    Case("torchrun", f"{_TORCHRUN} ddp.py --steps 60", LAUNCHERS, "Two equal ranks."),
    # Without the variable, gloo of torch 2.13 meets the addresses of the first attempt in the store, and hangs.
    Case("torchrun-restart",
         f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {_TORCHRUN} --max-restarts 1 elastic.py crash", LAUNCHERS,
         "A rank is killed and torchrun starts both again.", failures=1, attempts=2),
    Case("torchrun-resume", f"{_TORCHRUN} elastic.py crash", LAUNCHERS, "A second torchrun resumes.", failures=1,
         attempts=2, again=f"{_TORCHRUN} elastic.py crash"),
    Case("ddp-join", f"{_TORCHRUN} elastic.py uneven", LAUNCHERS, "A rank has fewer batches, with DDP's join."),
    Case("spawn", "python spawned.py", LAUNCHERS, "Ranks are started by mp.spawn."),
    Case("spawned-trials", "python trials.py commands", ONE_COMMAND, "A Python program starts two trainings.",
         attempts=None),
    Case("pool-of-trials", "python trials.py pool", SIDE_BY_SIDE, "A pool of two processes trains two models.",
         attempts=None),
    Case("prepare-first", "python shards.py --publish && python shards.py", LAUNCHERS,
         "A first run only prepares the data.", shell=True, attempts=None),
    Case("evaluate-last", "python train.py --out base.pt && python evaluate.py", LAUNCHERS,
         "A second script only evaluates.", shell=True, attempts=None),
    Case("pipe", "python -u train.py --steps 80 2>&1 | tee log", LAUNCHERS, "A pipe.", shell=True),
    Case("pause-between", "python train.py; sleep 2; python train.py --seed 1", ONE_COMMAND,
         "The second training begins after a pause.", shell=True, attempts=None),
    Case("heredoc", "python - --steps 80 < train.py", LAUNCHERS, "The program comes from standard input.", shell=True),
    Case("module", "python -m train --steps 80", LAUNCHERS, "python -m."),
]  # fmt: skip
"""The cases, grouped by topic."""
