"""`chameleon-mm plan`: what a model's step needs and what a plan makes of it, without a GPU and without the memory.

build = source_of("llama-7b", batch=1, seq=4096, dtype=...)     # a built-in shape, module:function, or Hugging Face's
step = record_step(build, spec, ...)                            # under fake tensors: shapes alone, a `Trace`
prediction = predict(step, spec, hbm_budget, host_budget)       # arithmetic
show(prediction, console); prediction.to_dict(); save_plot(prediction, path)
"""

from __future__ import annotations
