// What the kernels that draw ids share: one Request per row of logits (`SampleRequest` in src/kernels).
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
    // Row of the history, how many of its ids count, and how many of these, the first ones, are the prompt's. No ids:
    // no penalties.
    uint history_slot;
    uint history_len;
    uint prompt_len;
    uint first_bias;
    uint biases;
    // One more than the index of its mask; 0: every id may come.
    uint mask;
    // One more than the alternatives that are reported; 0: no log probabilities.
    uint logprobs;
};
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Requests { Request at[]; };

const uint NONE = 0xffffffffu;
// The ends of the finite numbers: Vulkan promises nothing about infinities and NaNs in comparisons and arithmetic, so what
// is not finite is told by its bits, and stands for nothing here.
const float LOWEST = uintBitsToFloat(0xff7fffffu);
const float HIGHEST = uintBitsToFloat(0x7f7fffffu);
bool is_finite(float f) { return (floatBitsToUint(f) & 0x7f800000u) != 0x7f800000u; }

// A word of `adjusted`, one for each logit. 0: the logit stands as it is. Below FIRST_CHANGED, and only until the
// penalties are taken: PROMPT where the prompt has the id, and how often the answer has it. Else a changed logit, its
// bits xor'ed with those of -infinity, which no changed logit is: words of the two first kinds are what would be negative
// NaNs, and no number is made of them.
const uint FIRST_CHANGED = 1u << 23;
const uint PROMPT = 1u << 22;
// The logit of an id that is forbidden.
const float FORBIDDEN = LOWEST;

uint changed(float logit) { return floatBitsToUint(is_finite(logit) ? logit : FORBIDDEN) ^ 0xff800000u; }
float adjusted_logit(uint word, float logit) {
    return word == 0 ? logit : uintBitsToFloat(word ^ 0xff800000u);
}
