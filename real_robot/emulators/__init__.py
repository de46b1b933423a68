"""Devices made of code, for the unmodified vendor SDKs: stateful, strict like silicon, and spoiled on purpose.

An emulator knows nothing of files, threads or real time: bytes and the time go in (``feed``), bytes come out
(``take``). `pty` puts one behind a pseudo-terminal in real time, `line.Loopback` behind a virtual clock, so that a seed
replays a failure. `faults` says what goes wrong, `servo` what is asked of a motor, and `plant` is the model that moves.
Every goal that was seen on the wire is kept, so that limits can be checked from the bytes.
"""
