"""The reference of the parity tests: the whole model on one rank, without a process group, FSDP or a pipeline."""

from dataclasses import replace

import torch
from torch import nn

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.learning_rate import learning_rate
from engine.metering.meter import Meter
from engine.model.loss import training_loss
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.context.context_parallel import ContextParallel
from engine.parallel.parameters import ParameterFactory
from engine.train.batches.corpus import read_text
from engine.train.batches.samples import Samples
from tests.ranks.cases.case import Script
from tests.ranks.parity.routing import fix_routing
from tests.ranks.parity.trace import Trace, router_biases, whole

ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # precisions of activations below fp32
# half a unit in the last place, relative to the value
HALF_UNIT = {
    "fp32": 2.0**-24,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
}


def one_process(layout: Layout, script: Script, steps: int, jolt: int | None = None) -> Trace:
    """The reference run. The run applies the changes of `script` that affect the loss, and ignores loss-neutral knobs.

    If `jolt` is given, each initial weight is increased or decreased by half a unit in the last place of the training
    precision, at random with `jolt` as the seed.
    """
    meter = Meter(layout.model.prediction_layers.stop, layout.model.moe.experts if layout.model.moe else 0)
    tp, ep = Axis("tp", None, meter), Axis("ep", None, meter)
    train, model = layout.train, layout.model
    knob_values = replace(KnobValues.of(layout), recompute="none")
    context = ContextParallel(Axis("cp", None, meter), tp, "ring", layout.data.reset_positions)
    factory = ParameterFactory(layout.run.seed, tp, ep, context=context)
    stage = Stage(factory, model, range(model.layers), knob_values, meter)
    if jolt is not None:
        coin = torch.Generator().manual_seed(jolt)
        with torch.no_grad():
            for p in stage.parameters():
                half_up = torch.randint(0, 2, p.shape, generator=coin, dtype=torch.float64)
                p.copy_(p.double() * (1.0 + HALF_UNIT[train.precision] * (2.0 * half_up - 1.0) * 1.01))
    samples = Samples(
        read_text(layout),
        model.seq_len,
        train.global_batch,
        layout.run.seed,
        documents=layout.data.separate_documents,
        mtp_layers=model.mtp_layers,
    )
    rounded = ROUNDED.get(train.precision)
    if rounded:
        fix_routing([stage])
    # With fp16, the reference multiplies all losses by the layout's first scale in every step.
    knob_values.loss_scale = scale = layout.loss_scale.initial if train.precision == "fp16" else 1.0
    weights = {name: nn.Parameter(p.detach().clone()) for name, p in stage.named_parameters()}
    if rounded:
        for p in stage.parameters():
            p.data = p.data.to(rounded)
    matrices = [p for p in weights.values() if p.ndim > 1]
    vectors = [p for p in weights.values() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
    trace = Trace()
    if train.ema is not None:
        trace.averages = {name: p.detach().clone() for name, p in weights.items()}
    for step in range(steps):
        meter.start_step(step)
        tokens, targets, starts = samples.batch(step, 0, train.global_batch)
        for name, p in stage.named_parameters():
            p.data.copy_(weights[name].data)
        logits = stage(tokens, starts, targets if model.mtp_layers else None)
        loss = training_loss(logits, targets, tp, scale / tokens.numel(), train.mtp_weight)
        loss.backward()
        trace.losses.append(float(loss.detach()) / scale)
        for name, p in stage.named_parameters():
            weights[name].grad, p.grad = whole(p.grad).to(weights[name].dtype) / scale, None
        trace.grads.append({name: whole(p.grad) for name, p in weights.items()})
        parameters = list(weights.values())
        most = float("inf") if knob_values.grad_clip is None else knob_values.grad_clip
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, most)))
        trace.dropped.append(int(meter.readings.dropped.sum()))
        trace.loads.append(meter.readings.load)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, knob_values.lr_scale)
        optimizer.step()
        optimizer.zero_grad()
        for name, average in trace.averages.items():
            average.copy_(train.ema * average + (1 - train.ema) * weights[name].detach())
        biases = router_biases(stage)
        for name, bias in biases.items():
            for expert, load in enumerate(counts := meter.readings.load[int(name.split(".")[1])].tolist()):
                mean = sum(counts) / len(counts)
                bias[expert] += knob_values.bias_rate * ((load < mean) - (load > mean))
        trace.biases.append({name: bias.clone() for name, bias in biases.items()})
        for knob, value in script.get(step, {}).items():
            if knob in vars(knob_values) and knob != "recompute":
                setattr(knob_values, knob, value)
    return trace
