// One core of the host semantics: its memories, the buffers of its queues, and what its pipes have not finished.
#ifndef LATENTSCAN_HOST_CORE_H
#define LATENTSCAN_HOST_CORE_H

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace AscendC {

enum class TPosition { GM, A1, B1, A2, B2, CO1, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;
enum class HardEvent { V_S, S_V, S_MTE3, MTE2_S, MTE2_V, V_MTE3 };
enum class RoundMode { CAST_NONE, CAST_RINT };
enum pipe_t { PIPE_V, PIPE_ALL };

namespace host {

#ifndef LATENTSCAN_UB_BYTES
#define LATENTSCAN_UB_BYTES (192 * 1024)
#endif

enum Memory { UB, L1, L0A, L0B, L0C, MEMORIES };
inline const char *name_of(Memory m) {
  static const char *names[] = {"UB", "L1", "L0A", "L0B", "L0C"};
  return names[m];
}

[[noreturn]] inline void fail(const std::string &what) { throw std::runtime_error(what); }

struct Range {
  const uint8_t *begin, *end;
  bool read_by_vector;
};

enum Pipe { NO_PIPE, LOADS, VECTOR, STORES, TO_L0, CUBE, FIX };
inline const char *name_of(Pipe p) {
  static const char *names[] = {"no pipe", "the loads", "the vector pipe", "the stores", "the loads to L0", "the cube",
                                "Fixpipe"};
  return names[p];
}

// A buffer of a queue: whether somebody holds it, and which pipe wrote it since it last came out of its queue.
struct Buffer {
  const uint8_t *begin, *end;
  bool free;
  Pipe writer;
};

// One core: its memories, its place in the launch, and what its pipes have not finished.
struct Core {
  int64_t block = 0, blocks = 1;
  int kind_of_core = 0;
  std::vector<uint8_t> memory[MEMORIES];
  size_t used[MEMORIES] = {};
  size_t most[MEMORIES] = {};
  bool scalar_pending = false;
  std::vector<Range> arriving;  // loads that no scalar may read yet
  std::vector<Range> computing;  // what the vector pipe writes, likewise
  std::vector<Buffer> buffers;   // of the queues

  void start() {
    size_t capacity[] = {LATENTSCAN_UB_BYTES, 512 * 1024, 64 * 1024, 64 * 1024, 128 * 1024};
    for (int m = 0; m < MEMORIES; ++m) {
      memory[m].assign(capacity[m] + 512, 0xFF);  // NaN until written
      used[m] = 0;
    }
    scalar_pending = false;
    arriving.clear();
    computing.clear();
    buffers.clear();
  }
  uint8_t *base(Memory m) {
    auto address = reinterpret_cast<uintptr_t>(memory[m].data());
    return memory[m].data() + (512 - address % 512) % 512;
  }
  uint8_t *take(Memory m, size_t bytes) {
    if (memory[m].empty()) start();
    size_t unit = m == UB ? 32 : 512, start_at = (used[m] + unit - 1) / unit * unit, capacity = memory[m].size() - 512;
    if (start_at + bytes > capacity)
      fail(std::string("capacity: ") + name_of(m) + " needs " + std::to_string(start_at + bytes) + " bytes, it has " +
           std::to_string(capacity));
    used[m] = start_at + bytes;
    most[m] = std::max(most[m], used[m]);
    return base(m) + start_at;
  }
};

inline Core &core() {
  static Core one;
  return one;
}

inline Buffer *buffer_of(const void *address) {
  auto *at = static_cast<const uint8_t *>(address);
  for (auto &buffer : core().buffers)
    if (at >= buffer.begin && at < buffer.end) return &buffer;
  return nullptr;
}

// A pipe reads or writes at an address. Outside of the queues only the vector pipe may.
inline void touches(const void *address, Pipe pipe, bool writes, const char *what) {
  Buffer *buffer = buffer_of(address);
  if (!buffer) {
    if (pipe != VECTOR) fail(std::string("queue: ") + what + " of a buffer that is in no queue");
    return;
  }
  if (buffer->free) fail(std::string("queue: ") + what + " of a freed buffer");
  if (buffer->writer != NO_PIPE && buffer->writer != pipe)
    fail(std::string("race: ") + what + " of what " + name_of(buffer->writer) + " wrote and no queue passed on");
  if (writes) buffer->writer = pipe;
}

inline Memory memory_of(TPosition position) {
  switch (position) {
    case TPosition::A1:
    case TPosition::B1: return L1;
    case TPosition::A2: return L0A;
    case TPosition::B2: return L0B;
    case TPosition::CO1: return L0C;
    default: return UB;
  }
}

inline void only(int kind, const char *what) {
  if (core().kind_of_core != kind) fail(std::string("wrong core: ") + what);
}

}  // namespace host

}  // namespace AscendC

#endif
