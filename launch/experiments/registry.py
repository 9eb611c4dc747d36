"""All experiments by name."""

from __future__ import annotations

from launch.experiments import eapo, reconstruction, spell
from launch.experiments.experiment import Experiment

PAPERS = {
    "SPELL": spell.EXPERIMENTS,
    "EAPO": eapo.EXPERIMENTS,
    "Document Reconstruction": reconstruction.EXPERIMENTS,
}
EXPERIMENTS = {
    experiment.name: experiment for experiments in PAPERS.values() for experiment in experiments
}


def find(name: str) -> Experiment:
    """Return the experiment of that name; the ValueError of an unknown one lists the known ones."""
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment = {name!r}: must be one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
