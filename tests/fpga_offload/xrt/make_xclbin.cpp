// An xclbin without a bitstream, for XRT's no-op device: kernels, their arguments and a bank of
// memory, packed by hand, since Debian's xclbinutil cannot.
//
// make_xclbin OUT METADATA.xml NAME ADDRESS ARGUMENTS [NAME ADDRESS ARGUMENTS ...]

#include <xrt/xclbin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

struct Section {
  axlf_section_kind kind;
  const char* name;
  std::vector<char> data;
};

// Room for a struct that ends with an array of one entry.
template <typename Head, typename Entry>
std::vector<char> room_for(std::size_t entries) {
  return std::vector<char>(sizeof(Head) + (entries - 1) * sizeof(Entry));
}

std::vector<char> memory() {
  auto data = room_for<mem_topology, mem_data>(1);
  auto* topology = reinterpret_cast<mem_topology*>(data.data());
  topology->m_count = 1;
  auto& bank = topology->m_mem_data[0];
  bank.m_type = MEM_DDR4;
  bank.m_used = 1;
  bank.m_size = 0x400000;  // KiB
  bank.m_base_address = 0x4000000000ULL;
  std::strcpy(reinterpret_cast<char*>(bank.m_tag), "bank0");
  return data;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6 || argc % 3 != 0) return 2;
  std::ifstream file(argv[2], std::ios::binary);
  const std::string metadata((std::istreambuf_iterator<char>(file)), {});
  const auto kernels = static_cast<std::size_t>(argc / 3 - 1);

  auto units = room_for<ip_layout, ip_data>(kernels);
  auto* layout = reinterpret_cast<ip_layout*>(units.data());
  layout->m_count = static_cast<std::int32_t>(kernels);
  std::vector<connection> connections;
  for (std::size_t i = 0; i < kernels; ++i) {
    char** given = argv + 3 + 3 * i;
    auto& unit = layout->m_ip_data[i];
    unit.m_type = IP_KERNEL;
    unit.properties = 1U | (AP_CTRL_HS << IP_CONTROL_SHIFT);
    unit.m_base_address = std::stoull(given[1], nullptr, 0);
    const std::string name = std::string(given[0]) + ":" + given[0] + "_1";
    std::strncpy(reinterpret_cast<char*>(unit.m_name), name.c_str(), sizeof unit.m_name - 1);
    for (int argument = 0; argument < std::stoi(given[2]); ++argument) {
      connections.push_back({argument, static_cast<std::int32_t>(i), 0});
    }
  }
  auto wires = room_for<connectivity, connection>(connections.size());
  auto* wiring = reinterpret_cast<connectivity*>(wires.data());
  wiring->m_count = static_cast<std::int32_t>(connections.size());
  std::memcpy(wiring->m_connection, connections.data(), connections.size() * sizeof(connection));

  const std::vector<Section> sections{
      {MEM_TOPOLOGY, "mem_topology", memory()},
      {IP_LAYOUT, "ip_layout", units},
      {CONNECTIVITY, "connectivity", wires},
      {EMBEDDED_METADATA, "metadata", {metadata.begin(), metadata.end()}},
  };
  const std::size_t head = sizeof(axlf) + (sections.size() - 1) * sizeof(axlf_section_header);
  std::vector<char> out((head + 7) & ~std::size_t{7});
  std::vector<axlf_section_header> headers(sections.size());
  for (std::size_t i = 0; i < sections.size(); ++i) {
    headers[i] = {};
    headers[i].m_sectionKind = sections[i].kind;
    std::strncpy(headers[i].m_sectionName, sections[i].name, sizeof headers[i].m_sectionName - 1);
    headers[i].m_sectionOffset = out.size();
    headers[i].m_sectionSize = sections[i].data.size();
    out.insert(out.end(), sections[i].data.begin(), sections[i].data.end());
    out.resize((out.size() + 7) & ~std::size_t{7});
  }
  auto* top = reinterpret_cast<axlf*>(out.data());
  std::memcpy(top->m_magic, "xclbin2", 8);
  top->m_signature_length = -1;
  std::memset(top->reserved, 0xff, sizeof top->reserved);
  std::memset(top->m_keyBlock, 0xff, sizeof top->m_keyBlock);
  top->m_uniqueId = 1;
  top->m_header.m_length = out.size();
  top->m_header.m_versionMajor = 2;
  top->m_header.m_versionMinor = 13;
  top->m_header.m_mode = XCLBIN_FLAT;
  std::strcpy(reinterpret_cast<char*>(top->m_header.m_platformVBNV), "xilinx_u2_gen3x4_xdma_gc_2");
  for (int i = 0; i < 16; ++i) top->m_header.uuid[i] = static_cast<unsigned char>(i + 1);
  top->m_header.m_numSections = static_cast<std::uint32_t>(sections.size());
  std::memcpy(top->m_sections, headers.data(), headers.size() * sizeof(axlf_section_header));
  std::ofstream file_out(argv[1], std::ios::binary);
  file_out.write(out.data(), static_cast<std::streamsize>(out.size()));
  return file_out ? 0 : 1;
}
