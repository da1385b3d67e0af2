// AMX, the matrix tiles of x86-64: does this machine let them run where its processor has them?
// Some virtual machines do not, and a library that believes the processor dies of SIGILL.
#pragma once

#include <string>

namespace lohan {

// How `work` fared in a process of its own: empty if it came to its end, else what ended it. It may
// call only what is safe between fork and exec, and is ended after so many seconds. Blocks.
std::string fate_in_child(void (*work)(), unsigned num_seconds);

// Multiplies two tiles, as a library would; never returns where tiles do not run.
void use_tiles();

// "none": the processor has no tiles. "run": it has, and they do. Else what became of a try.
std::string probe_tiles();

}  // namespace lohan
