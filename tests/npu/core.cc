// One core of the NPU as a program of the host, for tests/tools/test_npu_kernel.py: reads the calls of a dispatch and
// their objects from standard input, and writes each finished block of O to standard output.
//
// A call is a byte. After `b` follow an object and the block's number in an int32, after `q` an object, after `t` a
// tile of keys and one of values, after `p` and `f` nothing.

#include <cstdio>

#include "attention.cc"

namespace {

constexpr int ELEMENTS = TILE * HEAD_DIM;

alignas(64) bfloat16 keys[ELEMENTS], values[ELEMENTS], queries[ELEMENTS], weights[4 * TILE];
alignas(64) float output[ELEMENTS], sums[4 * TILE], scores[4 * TILE];
alignas(64) int32 exponents[4 * TILE], state[32];

template <typename T>
void read(T *to, size_t count) {
  if (fread(to, sizeof(T), count, stdin) != count)
    exit(2);
}

}  // namespace

int main() {
  for (int call; (call = getchar()) != EOF;) {
    int32 block = 0;
    switch (call) {
      case 'b':
        read(keys, ELEMENTS);
        read(&block, 1);
        attention_begin(keys, state, block);
        break;
      case 'q':
        read(keys, ELEMENTS);
        attention_queries(keys, queries);
        break;
      case 'p':
        attention_begin_pass(output, sums, exponents, state);
        break;
      case 't':
        read(keys, ELEMENTS);
        read(values, ELEMENTS);
        attention_tile(keys, values, output, queries, sums, exponents, scores, weights, state);
        break;
      case 'f':
        attention_finish(output, sums);
        if (fwrite(output, sizeof(float), ELEMENTS, stdout) != ELEMENTS)
          return 3;
        break;
      default:
        return 4;
    }
  }
}
