"""Small tests on few cores: one thread per process is fastest, and the same everywhere."""

import torch

torch.set_num_threads(1)
