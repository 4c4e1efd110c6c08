"""Fine-tuning with Hugging Face's Trainer: swapping is one callback."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import chameleon_mm as cm

model = LlamaForCausalLM(  # one of your own: AutoModelForCausalLM.from_pretrained(...)
    LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, use_cache=False
    )
)
texts = [list(f"{i} and {i + 1} are neighbours. ".encode() * 16)[:256] for i in range(64)]
dataset = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in texts]
swapping = cm.integrations.transformers.SwapCallback(hbm_budget="64MiB")
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "hugging_face_out",
        max_steps=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=dataset,
    callbacks=[swapping],  # the line that is new
)
trainer.train()
print(swapping.report())
swapping.report().save_html("hugging_face.html")
