"""A serving process: it loads the package and scores requests, and has neither `ikbo_recsys` nor `torchrec`.

python examples/serve.py ranker.pt2 request.pt scores.pt
"""

import sys

import fbgemm_gpu  # noqa: F401  (the table look-ups in the package are its operators)
import torch

package, request, scores = sys.argv[1:]
rank = torch._inductor.aoti_load_package(package)
with torch.no_grad():
    torch.save([rank(*inputs) for inputs in torch.load(request)], scores)
assert not {"ikbo_recsys", "torchrec"} & set(sys.modules)
