"""The same round over a network: what a node and a server do, whatever carries their messages.

`node.py` answers requests, `coordinator.py` asks them, `messages.py` has their form. `personafl/deployment/flower/`
carries them over Flower.
"""

from personafl.deployment.local_model import LocalModel, load_model
from personafl.deployment.settings import ClientSettings, Deployment

__all__ = ["ClientSettings", "Deployment", "LocalModel", "load_model"]
