from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest_lm import ARCHITECTURES
