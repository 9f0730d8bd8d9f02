// Instruction set of the kernels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention/problem.hpp"

namespace ssdkv::attention {

// Names this machine can run, best first; the last is always "portable".
std::vector<std::string> available_isas();

// The kernels in force: the best available ones unless select_isa() chose others.
const Kernels& active_kernels();

// Throws std::invalid_argument if this machine cannot run `name`. Process wide, safe from any
// thread.
void select_isa(std::string_view name);

}  // namespace ssdkv::attention
