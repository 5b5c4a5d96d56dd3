"""GPT-2 and Llama in one file that knows no parallelism, and tables of Hugging Face names.

May import: kernels.  Read first: `gpt`.
"""

from .gpt import GPT as GPT
from .gpt import GPTConfig as GPTConfig
