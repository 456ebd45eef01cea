# ranks: 3
# kind: never_joined
# culprits: 2
# exit: 3
# hang_after: 1.5

import os
import threading

import torch.distributed as dist

if os.environ["RANK"] == "2":
    threading.Event().wait()  # <-
dist.init_process_group("gloo")
