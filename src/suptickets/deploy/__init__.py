"""Tickets for use elsewhere: files of their own size, ONNX, and predictions on a CPU that skip zeros."""

from suptickets.compact import load_compact, save_compact
from suptickets.deploy.acceleration import accelerate
from suptickets.deploy.onnx import save_onnx
from suptickets.deploy.runtime import Accelerated

__all__ = ["Accelerated", "accelerate", "load_compact", "save_compact", "save_onnx"]
