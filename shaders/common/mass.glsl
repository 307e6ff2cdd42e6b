// Probabilities as integers ("masses"), in units of 2^-40 of the most likely id's probability. Sums of integers do not
// depend on the order. Every operation here is exact, or Vulkan requires it to be rounded correctly. So all devices
// compute the same masses as the reference implementation (tests/support/reference.rs).

// The temperature, clamped to a useful range. Lower temperatures have the same effect as 0, and higher ones make all
// ids equally likely. The range also keeps all numbers finite.
float bounded(float temperature) { return clamp(temperature, 1e-6, 1e28); }

// 1 / x rounded to nearest, for an x from `bounded`. Vulkan's division is not exact.
float reciprocal(float x) {
    const uint bits = floatBitsToUint(x);
    const uint divisor = (bits & 0x7fffffu) | 0x800000u;
    // Computes 2^48 / divisor, which is above 2^24 and at most 2^25, bit by bit. The last bit is for rounding.
    uint quotient = 0, rest = 1u << 23;
    for (uint i = 0; i < 26; i++) {
        quotient *= 2;
        if (rest >= divisor) {
            rest -= divisor;
            quotient |= 1;
        }
        rest *= 2;
    }
    // The second factor is the power of two of the quotient's last bit.
    return float(quotient / 2 + (quotient & 1)) * uintBitsToFloat((230 - (bits >> 23)) << 23);
}

// An id whose probability is 2^-WEIGHTLESS of the highest, or less, has no mass and is never drawn. Gumbel noise is
// between -4.3 and 22.9, a range of 39.1 powers of two, so such an id could never win.
const float WEIGHTLESS = 40.0;

uint high_product(uint a, uint b) {
    uint high, low;
    umulExtended(a, b, high, low);
    return high;
}

// 2^-t for 0 <= t < WEIGHTLESS, in two parts: the low 20 bits, and the next 20 bits. The sum of 4096 low or high parts
// fits into 32 bits. The mass is at least 1 and at most 2^40 - 2^9.
uvec2 mass(float t) {
    const uint whole = uint(t);
    const uint x = uint((t - float(whole)) * 2147483648.0) * 2;
    // 1 - 2^-x in units of 2^-32, with a polynomial that is exact at both ends. The error is at most 3e-9.
    uint y = 469656u;
    y = 5479739u - high_product(y, x);
    y = 41148157u - high_product(y, x);
    y = 238334300u - high_product(y, x);
    y = 1031756616u - high_product(y, x);
    y = 2977044038u - high_product(y, x);
    y = high_product(y, x);
    const uint power = min(0x80000000u - y / 2, 0x7fffffffu);
    const uint low = whole <= 9 ? power << (9 - whole) : power >> (whole - 9);
    return uvec2(low & 0xfffffu, whole <= 20 ? power >> (whole + 11) : 0);
}

// A 64-bit number is two words, the low word first.
uvec2 add64(uvec2 a, uvec2 b) {
    uint carry;
    const uint low = uaddCarry(a.x, b.x, carry);
    return uvec2(low, a.y + b.y + carry);
}

uvec2 subtract64(uvec2 a, uvec2 b) {
    uint borrow;
    const uint low = usubBorrow(a.x, b.x, borrow);
    return uvec2(low, a.y - b.y - borrow);
}

bool less64(uvec2 a, uvec2 b) { return a.y < b.y || (a.y == b.y && a.x < b.x); }

// Joins the sums of the two parts of masses into one number.
uvec2 joined(uvec2 parts) { return add64(uvec2(parts.x, 0), uvec2(parts.y << 20, parts.y >> 12)); }

// The part of a mass that top_p keeps: mass * top_p, with top_p rounded down to units of 2^-24. top_p is below 1.
uvec2 share(uvec2 mass, float top_p) {
    const uint part = uint(clamp(top_p, 0.0, 1.0) * 16777216.0);
    uint word0, word1, word2, above, carry;
    umulExtended(mass.x, part, above, word0);
    umulExtended(mass.y, part, word2, word1);
    word1 = uaddCarry(word1, above, carry);
    word2 += carry;
    return uvec2(word0 >> 24 | word1 << 8, word1 >> 24 | word2 << 8);
}
