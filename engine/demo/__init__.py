"""The built-in demo model."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
