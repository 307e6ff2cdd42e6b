// Declarations that the sampling kernels share. Each row of logits has one Request (`SampleRequest` in src/kernels).
struct Request {
    float temperature;
    uint top_k;
    float top_p;
    float min_p;
    uint seed_low;
    uint seed_high;
    uint position;
    uint slot;
    float repetition;
    float presence;
    float frequency;
    // Row of the history, the number of its ids that penalties apply to, and how many of these belong to the prompt.
    // The prompt comes first. With 0 ids there are no penalties.
    uint history_slot;
    uint history_len;
    uint prompt_len;
    uint first_bias;
    uint biases;
    // Index of the request's mask plus 1; 0: every id is allowed.
    uint mask;
    // Number of reported alternatives plus 1; 0: no log probabilities.
    uint logprobs;
};
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Requests { Request at[]; };

const uint NONE = 0xffffffffu;
// The lowest and the highest finite number. Vulkan does not guarantee how infinities and NaNs behave in comparisons and
// arithmetic. So they are recognized by their bits, and never used as sentinels.
const float LOWEST = uintBitsToFloat(0xff7fffffu);
const float HIGHEST = uintBitsToFloat(0x7f7fffffu);
bool is_finite(float f) { return (floatBitsToUint(f) & 0x7f800000u) != 0x7f800000u; }

// Each logit has a word in `adjusted`:
//
//   0                    the logit is unchanged
//   below FIRST_CHANGED  only between `count` and `penalize`: PROMPT if the prompt has the id, plus the number of times
//                        that the answer has it
//   other                the bits of a changed logit, xor the bits of -infinity
//
// A changed logit is never -infinity or a negative NaN: their words would be below FIRST_CHANGED.
const uint FIRST_CHANGED = 1u << 23;
const uint PROMPT = 1u << 22;
// The logit of a forbidden id.
const float FORBIDDEN = LOWEST;

uint changed(float logit) { return floatBitsToUint(is_finite(logit) ? logit : FORBIDDEN) ^ 0xff800000u; }
float adjusted_logit(uint word, float logit) {
    return word == 0 ? logit : uintBitsToFloat(word ^ 0xff800000u);
}
