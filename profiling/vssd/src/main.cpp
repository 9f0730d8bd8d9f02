// vssd: a file system of virtual SSDs. Directory N is device N; the data lies in memory, requests
// end when the device's model says so, and lines written to the file `control` change the model or
// inject faults. See ../__init__.py for how it is used.
#define FUSE_USE_VERSION 35
#include <fuse3/fuse_lowlevel.h>
#include <linux/falloc.h>
#include <linux/fuse.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "device.hpp"
#include "tree.hpp"

#ifndef FOPEN_PARALLEL_DIRECT_WRITES  // Linux 6.2; older headers lack the name, older kernels
                                      // ignore it
#define FOPEN_PARALLEL_DIRECT_WRITES (1 << 6)
#endif

namespace {

using namespace vssd;

constexpr size_t kMaxRequest = 1 << 20;
constexpr double kCacheNames = 1.0;  // seconds

std::vector<std::unique_ptr<Device>> devices;
std::unique_ptr<Tree> tree;

struct stat attributes(const Node& node) {
  struct stat s = {};
  s.st_ino = node.ino;
  s.st_mode = node.mode;
  s.st_nlink = node.linked ? (node.directory() ? 2 : 1) : 0;
  s.st_uid = node.uid;
  s.st_gid = node.gid;
  s.st_size = static_cast<off_t>(node.size);
  s.st_blksize = 4096;
  s.st_blocks = static_cast<blkcnt_t>(node.allocated / 512);
  s.st_mtim = s.st_ctim = s.st_atim = node.modified;
  return s;
}

void reply_entry(fuse_req_t request, const NodePtr& node) {
  fuse_entry_param entry = {};
  entry.ino = node->ino;
  entry.attr = attributes(*node);
  entry.attr_timeout = entry.entry_timeout = kCacheNames;
  node->lookups++;
  fuse_reply_entry(request, &entry);
}

// Runs `work` with the tree locked and the node found; work answers the request itself.
template <typename Work>
void with_node(fuse_req_t request, fuse_ino_t ino, Work work) {
  const std::lock_guard lock(tree->mutex);
  const NodePtr node = tree->find(ino);
  if (node == nullptr) {
    fuse_reply_err(request, ENOENT);
  } else {
    work(node);
  }
}

void lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  with_node(request, parent, [&](const NodePtr& node) {
    const NodePtr found = tree->child(node, name);
    if (found == nullptr) {
      fuse_reply_err(request, ENOENT);
    } else {
      reply_entry(request, found);
    }
  });
}

void forget(fuse_req_t request, fuse_ino_t ino, uint64_t count) {
  {
    const std::lock_guard lock(tree->mutex);
    tree->forget(ino, count);
  }
  fuse_reply_none(request);
}

void forget_multi(fuse_req_t request, size_t count, fuse_forget_data* forgets) {
  {
    const std::lock_guard lock(tree->mutex);
    for (size_t i = 0; i < count; i++) tree->forget(forgets[i].ino, forgets[i].nlookup);
  }
  fuse_reply_none(request);
}

void getattr(fuse_req_t request, fuse_ino_t ino, fuse_file_info*) {
  with_node(request, ino, [&](const NodePtr& node) {
    const struct stat s = attributes(*node);
    fuse_reply_attr(request, &s, kCacheNames);
  });
}

void setattr(fuse_req_t request, fuse_ino_t ino, struct stat* wanted, int which, fuse_file_info*) {
  with_node(request, ino, [&](const NodePtr& node) {
    if ((which & FUSE_SET_ATTR_SIZE) != 0 && node->data != nullptr) {
      if (const int error = tree->resize(node, static_cast<uint64_t>(wanted->st_size))) {
        fuse_reply_err(request, error);
        return;
      }
    }
    if ((which & FUSE_SET_ATTR_MODE) != 0) {
      node->mode = (node->mode & S_IFMT) | (wanted->st_mode & 07777);
    }
    if ((which & FUSE_SET_ATTR_UID) != 0) node->uid = wanted->st_uid;
    if ((which & FUSE_SET_ATTR_GID) != 0) node->gid = wanted->st_gid;
    if ((which & FUSE_SET_ATTR_MTIME) != 0) node->modified = wanted->st_mtim;
    const struct stat s = attributes(*node);
    fuse_reply_attr(request, &s, kCacheNames);
  });
}

void make(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
  with_node(request, parent, [&](const NodePtr& node) {
    const fuse_ctx* who = fuse_req_ctx(request);
    NodePtr made;
    if (const int error = tree->make(node, name, mode, who->uid, who->gid, &made)) {
      fuse_reply_err(request, error);
    } else {
      reply_entry(request, made);
    }
  });
}

void mknod(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode, dev_t) {
  make(request, parent, name, mode);
}

void mkdir(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
  make(request, parent, name, (mode & 07777) | S_IFDIR);
}

void unlink(fuse_req_t request, fuse_ino_t parent, const char* name) {
  with_node(request, parent,
            [&](const NodePtr& node) { fuse_reply_err(request, tree->remove(node, name, false)); });
}

void rmdir(fuse_req_t request, fuse_ino_t parent, const char* name) {
  with_node(request, parent,
            [&](const NodePtr& node) { fuse_reply_err(request, tree->remove(node, name, true)); });
}

void rename(fuse_req_t request, fuse_ino_t parent, const char* name, fuse_ino_t new_parent,
            const char* new_name, unsigned flags) {
  with_node(request, parent, [&](const NodePtr& from) {
    const NodePtr to = tree->find(new_parent);
    if (to == nullptr || (flags & ~1U) != 0) {  // 1 is RENAME_NOREPLACE
      fuse_reply_err(request, to == nullptr ? ENOENT : EINVAL);
      return;
    }
    fuse_reply_err(request, tree->rename(from, name, to, new_name, flags == 0));
  });
}

// libfuse 3.14 has no field for parallel direct writes, so the answer is made by hand. Without the
// flag the kernel writes to a file one request at a time, and every device has queue depth 1.
void open(fuse_req_t request, fuse_ino_t, fuse_file_info*) {
  fuse_open_out out = {};
  out.open_flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES;
  fuse_reply_buf(request, reinterpret_cast<const char*>(&out), sizeof out);
}

std::string status() {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < devices.size(); i++) {
    const Counters c = devices[i]->counters();
    text << (i == 0 ? "" : ",\n ") << "{\"device\": " << i << ", \"reads\": " << c.reads
         << ", \"writes\": " << c.writes << ", \"syncs\": " << c.syncs
         << ", \"read_bytes\": " << c.read_bytes << ", \"written_bytes\": " << c.written_bytes
         << ", \"used_bytes\": " << devices[i]->used()
         << ", \"capacity_bytes\": " << devices[i]->capacity() << '}';
  }
  text << "]\n";
  return text.str();
}

void read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t at, fuse_file_info*) {
  NodePtr node;
  const auto offset = static_cast<uint64_t>(at);
  std::string path;
  {
    const std::lock_guard lock(tree->mutex);
    node = tree->find(ino);
    if (node == nullptr || node->directory()) {
      fuse_reply_err(request, node == nullptr ? ENOENT : EISDIR);
      return;
    }
    if (node->device != nullptr) {
      size = offset < node->size ? std::min<uint64_t>(size, node->size - offset) : 0;
      path = Tree::path(*node);
    }
  }
  if (node->device == nullptr) {
    const std::string text = status();
    const size_t begin = std::min<size_t>(offset, text.size());
    fuse_reply_buf(request, text.data() + begin, std::min(size, text.size() - begin));
    return;
  }
  const int error = node->device->error(Op::read, path, offset, size);
  node->device->submit(Op::read, size, [request, node, offset, size, error] {
    if (error != 0) {
      fuse_reply_err(request, error);
    } else {
      fuse_reply_buf(request, reinterpret_cast<const char*>(node->data) + offset, size);
    }
  });
}

// One control line: DEVICE COMMAND ARGUMENTS. Returns an errno.
int control(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  if (words.empty()) return 0;
  char* end = nullptr;
  const unsigned long index = std::strtoul(words[0].c_str(), &end, 10);
  if (*end != '\0' || index >= devices.size() || words.size() < 2) return EINVAL;
  words.erase(words.begin());
  if (words[0] != "corrupt") return devices[index]->command(words) ? 0 : EINVAL;
  if (words.size() != 4) return EINVAL;
  const std::lock_guard lock(tree->mutex);
  const NodePtr node = tree->at(static_cast<unsigned>(index), words[1]);
  if (node == nullptr || node->data == nullptr) return ENOENT;
  const uint64_t offset = std::strtoull(words[2].c_str(), &end, 10);
  if (*end != '\0') return EINVAL;
  const uint64_t bytes = std::strtoull(words[3].c_str(), &end, 10);
  if (*end != '\0' || offset > node->size || bytes > node->size - offset) return EINVAL;
  for (uint64_t i = offset; i < offset + bytes; i++) node->data[i] ^= 0xff;
  return 0;
}

void write_control(fuse_req_t request, fuse_bufvec* in) {
  std::string text(fuse_buf_size(in), '\0');
  fuse_bufvec out = FUSE_BUFVEC_INIT(text.size());
  out.buf[0].mem = text.data();
  fuse_buf_copy(&out, in, static_cast<fuse_buf_copy_flags>(0));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (const int error = control(line)) {
      fuse_reply_err(request, error);
      return;
    }
  }
  fuse_reply_write(request, text.size());
}

void write_buf(fuse_req_t request, fuse_ino_t ino, fuse_bufvec* in, off_t at, fuse_file_info*) {
  const size_t size = fuse_buf_size(in);
  const auto offset = static_cast<uint64_t>(at);
  NodePtr node;
  std::string path;
  int error = 0;
  {
    const std::lock_guard lock(tree->mutex);
    node = tree->find(ino);
    if (node == nullptr || node->directory()) {
      fuse_reply_err(request, node == nullptr ? ENOENT : EISDIR);
      return;
    }
    if (node->device != nullptr) {
      path = Tree::path(*node);
      error = tree->allocate(node, offset + size);
    }
  }
  if (node->device == nullptr) {
    write_control(request, in);
    return;
  }
  if (error == 0) error = node->device->error(Op::write, path, offset, size);
  if (error == 0) {
    fuse_bufvec out = FUSE_BUFVEC_INIT(size);
    out.buf[0].mem = node->data + offset;
    fuse_buf_copy(&out, in, static_cast<fuse_buf_copy_flags>(0));
    const std::lock_guard lock(tree->mutex);
    node->size = std::max(node->size, offset + size);
    clock_gettime(CLOCK_REALTIME, &node->modified);
  }
  node->device->submit(Op::write, size, [request, node, size, error] {
    if (error != 0) {
      fuse_reply_err(request, error);
    } else {
      fuse_reply_write(request, size);
    }
  });
}

void fsync(fuse_req_t request, fuse_ino_t ino, int, fuse_file_info*) {
  with_node(request, ino, [&](const NodePtr& node) {
    if (node->device == nullptr) {
      fuse_reply_err(request, 0);
      return;
    }
    const int error = node->device->error(Op::sync, "", 0, 0);
    node->device->submit(Op::sync, 0, [request, node, error] { fuse_reply_err(request, error); });
  });
}

void fallocate(fuse_req_t request, fuse_ino_t ino, int mode, off_t at, off_t length,
               fuse_file_info*) {
  with_node(request, ino, [&](const NodePtr& node) {
    const auto begin = static_cast<uint64_t>(at), end = begin + static_cast<uint64_t>(length);
    if (node->data == nullptr) {
      fuse_reply_err(request, EPERM);
    } else if (mode == (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)) {
      const uint64_t stop = std::min(end, node->size);
      if (begin < stop) std::memset(node->data + begin, 0, stop - begin);
      fuse_reply_err(request, 0);
    } else if ((mode & ~FALLOC_FL_KEEP_SIZE) != 0) {
      fuse_reply_err(request, EOPNOTSUPP);
    } else {
      const int error = tree->allocate(node, end);
      if (error == 0 && mode == 0) node->size = std::max(node->size, end);
      fuse_reply_err(request, error);
    }
  });
}

void readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, fuse_file_info*) {
  with_node(request, ino, [&](const NodePtr& node) {
    std::vector<char> buffer(size);
    size_t used = 0;
    off_t index = 0;
    const auto add = [&](const char* name, const Node& entry) {
      if (index++ < offset) return true;
      const struct stat s = attributes(entry);
      const size_t length =
          fuse_add_direntry(request, buffer.data() + used, size - used, name, &s, index);
      if (length > size - used) return false;
      used += length;
      return true;
    };
    bool room = add(".", *node) && add("..", node->parent == nullptr ? *node : *node->parent);
    for (const auto& [name, entry] : node->children) {
      if (!room) break;
      room = add(name.c_str(), *entry);
    }
    fuse_reply_buf(request, buffer.data(), used);
  });
}

void statfs(fuse_req_t request, fuse_ino_t ino) {
  with_node(request, ino, [&](const NodePtr& node) {
    uint64_t capacity = 0, used = 0;
    for (const auto& device : devices) {
      if (node->device != nullptr && node->device != device.get()) continue;
      capacity += device->capacity();
      used += device->used();
    }
    struct statvfs s = {};
    s.f_bsize = s.f_frsize = 4096;
    s.f_blocks = capacity / 4096;
    s.f_bfree = s.f_bavail = (capacity - used) / 4096;
    s.f_files = s.f_ffree = s.f_favail = 1 << 20;
    s.f_namemax = NAME_MAX;
    fuse_reply_statfs(request, &s);
  });
}

void init(void*, fuse_conn_info* connection) {
  connection->max_background = connection->congestion_threshold = 4096;
  connection->max_write = kMaxRequest;
  connection->max_read = kMaxRequest;
  connection->max_readahead = 0;
  connection->want |= FUSE_CAP_ASYNC_DIO & connection->capable;
  connection->want &=
      ~static_cast<unsigned>(FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE);
  std::printf("up\n");
  std::fflush(stdout);
}

fuse_lowlevel_ops operations() {
  fuse_lowlevel_ops ops = {};
  ops.init = init;
  ops.lookup = lookup;
  ops.forget = forget;
  ops.forget_multi = forget_multi;
  ops.getattr = getattr;
  ops.setattr = setattr;
  ops.mknod = mknod;
  ops.mkdir = mkdir;
  ops.unlink = unlink;
  ops.rmdir = rmdir;
  ops.rename = rename;
  ops.open = open;
  ops.read = read;
  ops.write_buf = write_buf;
  ops.fsync = fsync;
  ops.fsyncdir = fsync;
  ops.fallocate = fallocate;
  ops.readdir = readdir;
  ops.statfs = statfs;
  return ops;
}

}  // namespace

// vssd MOUNT DEVICES BYTES BYTES_PER_S LATENCY_S IOPS
int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: vssd MOUNT DEVICES BYTES BYTES_PER_S LATENCY_S IOPS\n");
    return 2;
  }
  const int count = std::atoi(argv[2]);
  const uint64_t capacity = std::strtoull(argv[3], nullptr, 10);
  const Model model{std::atof(argv[4]), std::atof(argv[5]), std::atof(argv[6])};
  if (count < 1 || capacity < 4096 || model.bandwidth <= 0 || model.latency < 0 ||
      model.iops <= 0) {
    std::fprintf(stderr, "vssd: a number is out of range\n");
    return 2;
  }
  // A drive does not wait for the machine's processors. Without the right to it: as good as it
  // gets.
  setpriority(PRIO_PROCESS, 0, -15);
  for (int i = 0; i < count; i++) devices.push_back(std::make_unique<Device>(capacity, model));
  tree = std::make_unique<Tree>(devices, getuid(), getgid());

  std::string options = "default_permissions,fsname=ssdkv-vssd,subtype=ssdkv-vssd,max_read=" +
                        std::to_string(kMaxRequest);
  std::string program = argv[0], flag = "-o";
  char* arguments[] = {program.data(), flag.data(), options.data()};
  fuse_args args = FUSE_ARGS_INIT(3, arguments);
  const fuse_lowlevel_ops ops = operations();
  fuse_session* session = fuse_session_new(&args, &ops, sizeof ops, nullptr);
  if (session == nullptr || fuse_set_signal_handlers(session) != 0 ||
      fuse_session_mount(session, argv[1]) != 0) {
    return 1;
  }
  fuse_loop_config config = {};
  config.max_idle_threads = 4;
  const int result = fuse_session_loop_mt(session, &config);
  fuse_session_unmount(session);
  // Device threads and requests that hang still use what a normal exit would destroy.
  std::fflush(stdout);
  _exit(result == 0 ? 0 : 1);
}
