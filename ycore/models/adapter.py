"""`python -m ycore.models.adapter SRC DST`: a LoRA adapter's folder and its base, merged into a whole model.

A process of its own, for the same reasons as `gguf`. Engines then decode at the speed of any other model.

Not here: adapters in training, which are merged beside their base (`algorithms.weights`).
"""

import sys
from pathlib import Path

CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def merge(source: Path, folder: Path) -> None:
    """Write the merged model in its base's dtype, with the adapter's tokenizer, or else the base's."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(source, dtype="auto")
    base = model.peft_config["default"].base_model_name_or_path
    model.merge_and_unload().save_pretrained(folder)
    has_tokenizer = (source / "tokenizer_config.json").is_file()
    AutoTokenizer.from_pretrained(source if has_tokenizer else base).save_pretrained(folder)


def main() -> int:
    """Exit status 1 and one `error:` line where it cannot be done."""
    try:
        merge(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, RuntimeError) as problem:
        print(f"error: {str(problem).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
