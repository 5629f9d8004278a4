"""Inside the trainers people use: the same engine and the same observation, in their plug-ins.

None of these has numerics of its own, and none is imported before it is used:

    ampwise.integrations.lightning       `Precision`, a plugin; `Callback`
    ampwise.integrations.transformers    `Callback`, a TrainerCallback
    ampwise.integrations.timm            `NativeScaler`, with timm's own signature

Accelerate needs none: `ampwise.TrainStep` takes what it prepares (docs/integrations.md).
"""
