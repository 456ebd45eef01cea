# ranks: 3
# kind: never_joined
# culprits: 2
# exit: 3
# hang_after: 1.5

import os
import threading
import time

import torch.distributed as dist

if os.environ["RANK"] == "2":
    threading.Event().wait()  # <-
time.sleep(1.0)  # rank 2 has begun before anybody waits for it
dist.init_process_group("gloo")
