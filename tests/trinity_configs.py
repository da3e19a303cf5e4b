"""Configurations as users of Trinity-RFT have them: keys and values of its GSM8K and DPO examples."""

from __future__ import annotations

from typing import Any

GSM8K_SET = {
    "storage_type": "file",
    "path": "${oc.env:TRINITY_TASKSET_PATH,openai/gsm8k}",
    "subset_name": "main",
    "format": {"prompt_key": "question", "response_key": "answer"},
    "rollout_args": {"temperature": 1.0},
}
MODEL = {
    "model_path": "${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-1.5B-Instruct}",
    "max_response_tokens": 1024,
    "max_model_len": 1280,
}
CACHING = {"enable_prefix_caching": False, "enforce_eager": True}
GSM8K: dict[str, Any] = {
    "project": "Trinity-RFT-gsm8k",
    "name": "qwen2.5-1.5B-gsm8k",
    "checkpoint_root_dir": "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}",
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 1e-5}},
    "model": MODEL,
    "cluster": {"node_num": 1, "gpu_per_node": 8},
    "buffer": {
        "total_epochs": 1,
        "batch_size": 96,
        "explorer_input": {
            "taskset": {"name": "gsm8k", "split": "train", **GSM8K_SET},
            "eval_tasksets": [{"name": "gsm8k-eval", "split": "test", **GSM8K_SET}],
            "default_workflow_type": "math_workflow",
        },
        "trainer_input": {
            "experience_buffer": {"name": "gsm8k_buffer", "storage_type": "queue", "path": "sqlite:///gsm8k.db"}
        },
    },
    "explorer": {
        "eval_interval": 50,
        "runner_per_model": 8,
        "rollout_model": {"engine_num": 2, "tensor_parallel_size": 1, **CACHING, "dtype": "bfloat16", "seed": 42},
    },
    "synchronizer": {"sync_method": "nccl", "sync_interval": 1, "sync_timeout": 1200},
    "trainer": {
        "save_interval": 100,
        "grad_clip": 1.0,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 16384,
        "ulysses_sequence_parallel_size": 1,
    },
}
GSM8K_STAGES: dict[str, Any] = {
    **{key: value for key, value in GSM8K.items() if key != "algorithm"},
    "stages": [
        {
            "stage_name": "sft_warmup",
            "mode": "train",
            "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-5}},
            "buffer": {
                "train_batch_size": 128,
                "total_steps": 10,
                "trainer_input": {
                    "experience_buffer": {
                        "name": "sft_data",
                        "storage_type": "file",
                        "path": "${oc.env:TRINITY_SFT_DATASET_PATH}",
                        "split": "train",
                        "format": {"prompt_type": "messages", "messages_key": "messages"},
                    }
                },
            },
        },
        {"stage_name": "rft", "algorithm": GSM8K["algorithm"]},
    ],
}
COSINE = {"warmup_style": "cosine", "betas": [0.9, 0.95]}
PAIRS = {"prompt_type": "plaintext", "prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
DPO: dict[str, Any] = {
    "project": "dpo_example",
    "name": "trinity_dpo",
    "mode": "train",
    "algorithm": {
        "algorithm_type": "dpo",
        "optimizer": {"lr": 5e-7, "lr_warmup_steps_ratio": 0.03, "min_lr_ratio": 0.1, **COSINE},
        "kl_loss_fn": "k1",
        "kl_loss_fn_args": {"kl_coef": 0.1},
    },
    "checkpoint_root_dir": "${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}",
    "model": {**MODEL, "max_model_len": 1536},
    "cluster": {"node_num": 1, "gpu_per_node": 8},
    "buffer": {
        "total_epochs": 2,
        "train_batch_size": 64,
        "trainer_input": {
            "experience_buffer": {
                "name": "dpo_buffer",
                "storage_type": "file",
                "enable_progress_bar": True,
                "path": "${oc.env:TRINITY_TASKSET_PATH}",
                "format": PAIRS,
            }
        },
    },
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 30, "sync_timeout": 1200},
    "trainer": {
        "save_interval": 30,
        "total_steps": 200,
        "use_dynamic_bsz": False,
        "ppo_max_token_len_per_gpu": 16384,
        "ulysses_sequence_parallel_size": 1,
        "trainer_config": {
            "actor_rollout_ref": {
                "actor": {"ppo_micro_batch_size_per_gpu": 2},
                "ref": {"log_prob_micro_batch_size_per_gpu": 2},
            },
            "trainer": {"balance_batch": False},
        },
    },
}
