"""Models that know no parallelism."""

from .gpt import GPT as GPT
from .gpt import GPTConfig as GPTConfig
