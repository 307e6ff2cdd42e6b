// The activations of the gate of a feed-forward network. Include after the declaration of SILU, which chooses one.

// gelu_tanh(g) = g/2 (1 + tanh u) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3). The second form has no tanh,
// whose precision in Vulkan is low. In f32, the result is 0 for g below -10, and g above 10. u is computed from the
// clamped g, so that exp does not overflow: Vulkan does not guarantee support of infinities.
float gelu_tanh(float g) {
    const float c = clamp(g, -10.0, 10.0);
    const float u = 0.7978845608028654 * (c + 0.044715 * c * c * c);
    return g < -10.0 ? g * 0.0 : g / (1.0 + exp(-2.0 * u));
}

// silu(g) = g / (1 + exp(-g)). Below -80 it is above -2e-33, which counts as 0.
float silu(float g) { return g < -80.0 ? g * 0.0 : g / (1.0 + exp(-max(g, -80.0))); }

float activated(float g) { return SILU == 1 ? silu(g) : gelu_tanh(g); }
