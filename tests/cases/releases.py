"""What programs of the corpus need to know of the release of torch."""

import torch.distributed as dist

SHORT_WAY = hasattr(dist.AllreduceOptions(), "asyncOp")
"""Whether torch tells a group that a call goes on by itself; where it does not, the guard records each at length."""
ASKS_MODES = hasattr(dist.distributed_c10d, "has_torch_function")
"""Whether a mode of torch functions sees collectives."""
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""By the names of torch 2.13, or the older ones."""
