// What lies on the virtual SSDs: one directory per device, with files in memory below it.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.hpp"

namespace vssd {

// A file or directory. `data` is fixed and as long as the device from the first byte on (address
// space costs nothing), so readers and writers need no lock; bytes beyond the size are zero.
struct Node {
  uint64_t ino = 0;
  Node* parent = nullptr;
  std::string name;  // of a file or directory; of a device its number
  mode_t mode = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  Device* device = nullptr;  // null: the root and the control file
  timespec modified{};
  std::map<std::string, std::shared_ptr<Node>> children;
  uint8_t* data = nullptr;
  uint64_t size = 0;
  uint64_t allocated = 0;  // bytes taken from the device
  uint64_t lookups = 0;    // references that the kernel holds
  bool linked = true;

  Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node();
  bool directory() const { return S_ISDIR(mode); }
  // Whether it is the root or the directory of a whole device.
  bool top() const { return parent == nullptr || parent->parent == nullptr; }
};

using NodePtr = std::shared_ptr<Node>;

constexpr uint64_t kRoot = 1;
constexpr uint64_t kControl = 2;

// Every method expects `mutex` to be held.
class Tree {
 public:
  Tree(const std::vector<std::unique_ptr<Device>>& devices, uid_t uid, gid_t gid);

  std::mutex mutex;

  NodePtr find(uint64_t ino);                              // null: none
  NodePtr child(const NodePtr& parent, const char* name);  // null: none
  NodePtr at(unsigned device, const std::string& path);    // null: none; "a/b" below the device
  static std::string path(const Node& node);               // the same path
  // An errno, or 0 and the new node.
  int make(const NodePtr& parent, const char* name, mode_t mode, uid_t uid, gid_t gid,
           NodePtr* made);
  int remove(const NodePtr& parent, const char* name, bool directory);
  int rename(const NodePtr& from, const char* name, const NodePtr& to, const char* new_name,
             bool replace);
  int resize(const NodePtr& node, uint64_t size);   // cut or grow
  int allocate(const NodePtr& node, uint64_t end);  // take space up to `end`
  void forget(uint64_t ino, uint64_t count);

 private:
  void drop_if_unused(const NodePtr& node);

  std::unordered_map<uint64_t, NodePtr> nodes_;
  uint64_t next_ = 3;
};

}  // namespace vssd
