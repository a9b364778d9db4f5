"""Made-up run directories with the look of real ones."""
import json


def config(scheme, *, task="copy", train_max=16, steps=1500, num_seeds=3, **scheme_hyper):
    return {"seed": 0, "num_seeds": num_seeds, "scheme": {"name": scheme, **scheme_hyper},
            "task": {"name": task, "symbols": 29}, "positions": {"train": {"name": "sequential"}, "eval": {"name": "sequential"}},
            "model": {"width": 64, "depth": 2, "num_heads": 4, "head_dim": 16, "mlp_ratio": 4, "dtype": "float32"},
            "train": {"steps": steps, "batch_size": 64, "learning_rate": 1e-3,
                      "lengths": {"name": "uniform", "min": 1, "max": train_max}},
            "eval": {"lengths": [16], "num_examples": 512, "fit_threshold": 0.95}, "imports": []}


def row(seed, length, exact, *, step=1500, condition=None, status="ok", num_examples=512, tokens=None, positions=None):
    gone = status != "ok"
    return {"step": step, "seed": seed, "length": length, "condition": condition or {}, "num_examples": num_examples,
            "exact_match": None if gone else exact, "token_accuracy": None if gone else (exact if tokens is None else tokens),
            "loss": None if gone else 0.1,
            "per_position": [] if gone else (positions if positions is not None else [exact] * min(length, 4)), "status": status}


def curves(*seeds, **keywords):
    """Rows from one `{length: exact match}` a seed; a string in place of a number is a status."""
    return [row(seed, n, value, **keywords) if not isinstance(value, str) else row(seed, n, None, status=value, **keywords)
            for seed, curve in enumerate(seeds) for n, value in curve.items()]


def write_run(path, config, rows, *, done=True, metrics=None, command="posjax train --config=configs/copy.py:rope"):
    path.mkdir(parents=True)
    seeds = list(range(config["num_seeds"]))
    if metrics is None:
        metrics = [{"step": step, "seeds": seeds, "loss": [3.0 / step + 0.001 * s for s in seeds],
                    "grad_norm": [1.0] * len(seeds),
                    "train_token_accuracy": [0.9] * len(seeds), "learning_rate": 1e-3, "tokens_per_second": 1e5,
                    "steps_per_second": 50.0, "seconds": step / 50} for step in range(50, 1501, 50)]
    (path / "config.json").write_text(json.dumps(config))
    (path / "environment.json").write_text(json.dumps(
        {"posjax": "0.1.0", "jax": "0.10.2", "python": "3.11.7", "devices": ["cpu:0"], "command": command,
         "git_commit": None, "started": "2026-05-09T07:35:25"}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (path / "evals.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if done:
        (path / "DONE").write_text("{}")
    return path
