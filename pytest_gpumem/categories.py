"""The categories every byte falls into, in the order tables show them."""

from __future__ import annotations

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer_state"
ACTIVATIONS = "activations"
INPUTS = "inputs"
BUFFERS = "buffers"
COMMUNICATION = "communication"
TEMPORARIES = "temporaries"
WORKSPACE = "workspace"
OTHER = "other"

CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER_STATE,
    ACTIVATIONS,
    INPUTS,
    BUFFERS,
    COMMUNICATION,
    TEMPORARIES,
    WORKSPACE,
    OTHER,
)

# Parameters + gradients + optimizer state: what the 4N budget of AdamW speaks of.
MODEL_STATES = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
