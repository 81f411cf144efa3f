"""How the engines of a fault test schedule. Together the tests cover transport, depth, policy and pool pairwise:

    test_failed_loads      nixl   depth 2   priority   ample        tcp   depth 3   fcfs       small
    test_transfer_faults   nixl   depth 3   fcfs       ample        tcp   depth 2   priority   ample
    test_aborts            nixl   depth 2   fcfs       small        tcp   depth 3   priority   ample
    test_bad_loads         nixl   depth 3   priority   small        tcp   depth 2   priority   small

Exactness has its own cover in test_exactness.py. 32 MiB of float32 are 45 blocks, 720 tokens.
"""

from __future__ import annotations

from itertools import product

SMALL_POOL = "--kv-memory=32MiB"
# What a failed READ may still write lies in quarantine; of a small pool that may be all.
SMALL = (SMALL_POOL, "--max-quarantined-share=1")
DEPTH_3 = ("--async-depth=3",)
PRIORITY = ("--policy=priority",)

# Every mode of both transports, for `soak`.
EVERY_MODE = [
    (f"--transport={transport}", f"--async-depth={depth}", f"--policy={policy}", *pool)
    for transport, depth, policy, pool in product(("tcp", "nixl"), (1, 2, 3), ("fcfs", "priority"), ((), SMALL))
]
