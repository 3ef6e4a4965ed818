// Runs one launch on the host: every block of the kernel, one after the other. Returns nullptr or what went wrong.
#include <string>

#include "chunk_scan.cpp"
#include "state_update.cpp"

namespace {

std::string message;

template <typename... Types, size_t... I>
void Spread(void (*kernel)(Types...), void **arguments, std::index_sequence<I...>) {
  kernel(static_cast<GM_ADDR>(arguments[I])...);
}

template <typename... Types>
const char *Run(void (*kernel)(Types...), int64_t blocks, void **arguments) {
  auto &core = AscendC::host::core();
  try {
    for (int64_t block = 0; block < blocks; ++block) {
      core.block = block;
      core.blocks = blocks;
      core.kind_of_core = 0;
      Spread(kernel, arguments, std::make_index_sequence<sizeof...(Types)>());
    }
  } catch (const std::exception &error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}

}  // namespace

#define ENTRY(name) \
  extern "C" const char *run_##name(int64_t blocks, void **arguments) { return Run(name, blocks, arguments); }
ENTRY(latentscan_decay)
ENTRY(latentscan_scores)
ENTRY(latentscan_weights)
ENTRY(latentscan_inner)
ENTRY(latentscan_states)
ENTRY(latentscan_carry)
ENTRY(latentscan_entering)
ENTRY(latentscan_output)
ENTRY(latentscan_state_update)

extern "C" int64_t most_unified_buffer() { return static_cast<int64_t>(AscendC::host::core().most[0]); }
extern "C" void forget() { for (auto &n : AscendC::host::core().most) n = 0; }
