#include "tree.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

namespace vssd {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;

uint64_t pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void touch(Node& node) { clock_gettime(CLOCK_REALTIME, &node.modified); }

}  // namespace

Node::~Node() {
  if (data != nullptr) munmap(data, device->capacity());
  if (allocated != 0) device->reserve(-static_cast<int64_t>(allocated));
}

Tree::Tree(const std::vector<std::unique_ptr<Device>>& devices, uid_t uid, gid_t gid) {
  const auto add = [&](uint64_t ino, mode_t mode) {
    auto node = std::make_shared<Node>();
    node->ino = ino;
    node->mode = mode;
    node->uid = uid;
    node->gid = gid;
    node->lookups = 1;  // never forgotten
    touch(*node);
    nodes_[ino] = node;
    return node;
  };
  const NodePtr root = add(kRoot, S_IFDIR | 0755);
  const auto link = [&](const NodePtr& node, const std::string& name) {
    node->name = name;
    node->parent = root.get();
    root->children[name] = node;
  };
  link(add(kControl, S_IFREG | 0600), "control");
  for (size_t i = 0; i < devices.size(); i++) {
    const NodePtr top = add(next_++, S_IFDIR | 0700);
    top->device = devices[i].get();
    link(top, std::to_string(i));
  }
}

NodePtr Tree::find(uint64_t ino) {
  const auto found = nodes_.find(ino);
  return found == nodes_.end() ? nullptr : found->second;
}

NodePtr Tree::child(const NodePtr& parent, const char* name) {
  const auto found = parent->children.find(name);
  return found == parent->children.end() ? nullptr : found->second;
}

NodePtr Tree::at(unsigned device, const std::string& path) {
  NodePtr node = child(find(kRoot), std::to_string(device).c_str());
  for (size_t begin = 0; node != nullptr && begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    node = child(node, path.substr(begin, end - begin).c_str());
    begin = end + 1;
  }
  return node;
}

std::string Tree::path(const Node& node) {
  std::string path = node.name;
  for (const Node* up = node.parent; up != nullptr && !up->top(); up = up->parent) {
    path = up->name + "/" + path;
  }
  return path;
}

int Tree::make(const NodePtr& parent, const char* name, mode_t mode, uid_t uid, gid_t gid,
               NodePtr* made) {
  if (parent->device == nullptr) return EPERM;  // the root holds devices, nothing else
  if (!S_ISDIR(mode) && !S_ISREG(mode)) return EPERM;
  if (child(parent, name) != nullptr) return EEXIST;
  auto node = std::make_shared<Node>();
  node->ino = next_++;
  node->parent = parent.get();
  node->name = name;
  node->mode = mode;
  node->uid = uid;
  node->gid = gid;
  node->device = parent->device;
  if (S_ISREG(mode)) {
    void* data = mmap(nullptr, node->device->capacity(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return ENOSPC;
    node->data = static_cast<uint8_t*>(data);
  }
  touch(*node);
  touch(*parent);
  parent->children[name] = node;
  nodes_[node->ino] = node;
  *made = node;
  return 0;
}

int Tree::remove(const NodePtr& parent, const char* name, bool directory) {
  const NodePtr node = child(parent, name);
  if (node == nullptr) return ENOENT;
  if (parent->device == nullptr) return EPERM;
  if (node->directory() != directory) return directory ? ENOTDIR : EISDIR;
  if (!node->children.empty()) return ENOTEMPTY;
  parent->children.erase(name);
  touch(*parent);
  node->linked = false;
  node->parent = nullptr;
  drop_if_unused(node);
  return 0;
}

int Tree::rename(const NodePtr& from, const char* name, const NodePtr& to, const char* new_name,
                 bool replace) {
  const NodePtr node = child(from, name);
  if (node == nullptr) return ENOENT;
  if (from->device == nullptr || to->device == nullptr) return EPERM;
  if (from->device != to->device) return EXDEV;
  if (const NodePtr old = child(to, new_name); old != nullptr && old != node) {
    if (!replace) return EEXIST;
    if (const int error = remove(to, new_name, node->directory())) return error;
  }
  from->children.erase(name);
  to->children[new_name] = node;
  node->parent = to.get();
  node->name = new_name;
  touch(*from);
  touch(*to);
  return 0;
}

int Tree::resize(const NodePtr& node, uint64_t size) {
  if (size > node->device->capacity()) return EFBIG;
  if (size < node->size) {
    const uint64_t keep = pages(size);
    std::fill(node->data + size, node->data + std::min(keep, node->size), uint8_t{0});
    if (node->allocated > keep) {
      madvise(node->data + keep, node->allocated - keep, MADV_DONTNEED);
      node->device->reserve(-static_cast<int64_t>(node->allocated - keep));
      node->allocated = keep;
    }
  }
  node->size = size;
  touch(*node);
  return 0;
}

int Tree::allocate(const NodePtr& node, uint64_t end) {
  if (end > node->device->capacity()) return EFBIG;
  const uint64_t wanted = pages(end);
  if (wanted <= node->allocated) return 0;
  if (!node->device->reserve(static_cast<int64_t>(wanted - node->allocated))) return ENOSPC;
  // Small files would waste most of a huge page.
  if (wanted >= kHugePage) madvise(node->data, wanted, MADV_HUGEPAGE);
  node->allocated = wanted;
  return 0;
}

void Tree::forget(uint64_t ino, uint64_t count) {
  const NodePtr node = find(ino);
  if (node == nullptr) return;
  node->lookups -= std::min(node->lookups, count);
  drop_if_unused(node);
}

void Tree::drop_if_unused(const NodePtr& node) {
  if (!node->linked && node->lookups == 0) nodes_.erase(node->ino);
}

}  // namespace vssd
