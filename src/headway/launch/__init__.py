"""Launching: workers that start in milliseconds, watched over by a supervisor that ends and restarts them.

A command and torchrun's options come in; an exit code, and a journal of launching, detecting, tearing down and
restarting, come out. What a failure was and what to do about it this room does not know: it collects evidence and asks.

- `agent` the loop of one node, on torchelastic (`elastic` is what it needs of that); `peers` what the agents of several
  nodes tell each other
- `crew` the workers as their supervisor sees them; `zygote`, `worker`, `entry` what runs inside of them, `channel` how
  both speak; `prewarm`, `threads` what a zygote imports, and without starting threads
- `autopsy`, `streams`, `progress`, `dumps` where evidence comes from
- `signals`, `notice`, `slurm` being told to stop
- `surroundings` what around a job will hurt it

Typical use::

    crew = Crew(command, os.environ, PRELOAD)          # its zygote begins to import torch at once
    agent = Agent(spec, config, command, crew, recorder, process, places, surgery, print, scratch)
    agent.run()
    sys.exit(agent.exit_code)
"""
