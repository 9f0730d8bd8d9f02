// Python module vllm_ssdkv._index: which slot holds which block, and the records of the journal.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/arrays.hpp"
#include "base/unlocked.hpp"
#include "index/record.hpp"
#include "index/replay.hpp"
#include "index/slot_table.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using Slots = ArrayIn<int64_t>;

const Key& to_key(const nb::bytes& key) {
  if (key.size() != sizeof(Key)) {
    throw std::invalid_argument("key of " + std::to_string(key.size()) + " bytes");
  }
  return *static_cast<const Key*>(key.data());
}

nb::bytes to_bytes(const Key& key) { return nb::bytes(key.data(), key.size()); }

nb::bytes to_bytes(const std::vector<Record>& records) {
  return nb::bytes(records.data(), records.size() * sizeof(Record));
}

// Pointers into the objects of a Python list; they live as long as it does.
std::vector<const Key*> to_keys(const nb::list& list) {
  std::vector<const Key*> keys;
  keys.reserve(list.size());
  for (const nb::handle one : list) {
    if (!nb::isinstance<nb::bytes>(one)) throw nb::type_error("a key is not bytes");
    keys.push_back(&to_key(nb::borrow<nb::bytes>(one)));
  }
  return keys;
}

nb::bytes encode_records(uint32_t kind, const Slots& slots, const Slots& epochs,
                         const std::optional<nb::list>& keys, uint64_t first_sequence) {
  const size_t n = slots.shape(0);
  if (epochs.shape(0) != n || (keys && keys->size() != n)) {
    throw std::invalid_argument("slots, epochs and keys differ in length");
  }
  const std::vector<const Key*> given = keys ? to_keys(*keys) : std::vector<const Key*>();
  std::vector<Record> records;
  records.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    records.push_back(sealed(static_cast<Kind>(kind), static_cast<uint64_t>(slots.data()[i]),
                             static_cast<uint64_t>(epochs.data()[i]), first_sequence + i,
                             keys ? *given[i] : Key{}));
  }
  return to_bytes(records);
}

nb::list to_list(const std::vector<Key>& keys) {
  nb::list list;
  for (const Key& key : keys) list.append(to_bytes(key));
  return list;
}

nb::list keys_of(Replay& replay) {
  nb::list keys;
  for (const uint32_t slot : replay.live()) keys.append(to_bytes(replay.newest(slot).key));
  return keys;
}

template <class Value>
ArrayOut<int64_t> of_live(Replay& replay, const Value& value) {
  std::vector<int64_t> values;
  values.reserve(replay.live().size());
  for (const uint32_t slot : replay.live()) values.push_back(value(slot));
  return to_numpy(std::move(values));
}

void bind_replay(nb::module_& m) {
  nb::class_<Replay>(m, "Replay")
      .def(nb::init<uint64_t>(), "num_slots"_a)
      .def(
          "feed",
          [](Replay& self, const nb::bytes& data) {
            const auto* const first = static_cast<const std::byte*>(data.data());
            const Unlocked unlocked;
            self.feed(first, data.size());
          },
          "data"_a)
      .def_prop_ro(
          "slots", [](Replay& self) { return of_live(self, [](uint32_t slot) { return slot; }); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "epochs",
          [](Replay& self) {
            return of_live(self, [&self](uint32_t slot) {
              return static_cast<int64_t>(self.newest(slot).epoch);
            });
          },
          nb::rv_policy::automatic)
      .def_prop_ro("keys", &keys_of)
      .def_prop_ro("records", &Replay::records)
      .def_prop_ro("corrupt", &Replay::corrupt)
      .def_prop_ro("damaged", &Replay::damaged)
      .def_prop_ro("out_of_range", &Replay::out_of_range)
      .def_prop_ro("superseded", &Replay::superseded)
      .def_prop_ro("newest_epoch", &Replay::newest_epoch)
      .def_prop_ro("newest_sequence", &Replay::newest_sequence);
}

nb::tuple to_tuple(Gone gone) {
  return nb::make_tuple(to_numpy(std::move(gone.slots)), to_numpy(std::move(gone.epochs)));
}

ArrayOut<int64_t> lookup(const SlotTable& self, const nb::list& keys) {
  return to_numpy(self.lookup(to_keys(keys)));
}

// Looks at keys from the end on, and at no more than it has to.
size_t last(const SlotTable& self, const nb::list& keys, size_t first, size_t end,
            const std::vector<uint8_t>& tags) {
  if (end > keys.size()) throw std::out_of_range("end behind the keys");
  for (size_t n = end; n > first; --n) {
    const nb::handle one = keys[n - 1];
    if (!nb::isinstance<nb::bytes>(one)) throw nb::type_error("a key is not bytes");
    const Key& key = to_key(nb::borrow<nb::bytes>(one));
    if (self.has_all(key, tags)) return n;
  }
  return first;
}

nb::tuple allocate(SlotTable& self, size_t n) {
  Gone gone;
  auto slots = self.allocate(n, gone);
  return nb::make_tuple(to_numpy(std::move(slots)), to_numpy(std::move(gone.slots)),
                        to_numpy(std::move(gone.epochs)));
}

nb::tuple durable(SlotTable& self, const Slots& slots) {
  Stored stored = self.durable(slots.data(), slots.shape(0));
  nb::list keys = to_list(stored.keys);
  return nb::make_tuple(to_numpy(std::move(stored.slots)), to_numpy(std::move(stored.epochs)), keys,
                        to_numpy(std::move(stored.older)));
}

nb::tuple replace(SlotTable& self, const Slots& from, const Slots& to) {
  if (from.shape(0) != to.shape(0)) throw std::invalid_argument("slots differ in length");
  Moved moved = self.replace(from.data(), to.data(), from.shape(0));
  nb::list keys = to_list(moved.stored.keys);
  return nb::make_tuple(std::move(moved.which), to_numpy(std::move(moved.from)),
                        to_numpy(std::move(moved.stored.slots)),
                        to_numpy(std::move(moved.stored.epochs)), keys);
}

nb::tuple walk(SlotTable& self, uint64_t first_sequence, size_t budget) {
  std::vector<Record> records;
  bool more = false;
  {
    const Unlocked unlocked;
    more = self.walk(first_sequence, budget, records);
  }
  return nb::make_tuple(to_bytes(records), more);
}

nb::dict counts(const SlotTable& self) {
  const Counts& counts = self.counts();
  nb::dict out;
  out["allocated"] = counts.allocated;
  out["evictions"] = counts.evictions;
  out["published"] = counts.published;
  out["duplicates"] = counts.duplicates;
  out["dropped"] = counts.dropped;
  out["quarantined"] = counts.quarantined;
  out["recovered"] = counts.recovered;
  out["retentions_cut"] = counts.retentions_cut;
  return out;
}

void bind_table(nb::module_& m) {
  nb::class_<SlotTable>(m, "SlotTable")
      .def(nb::init<uint64_t>(), "num_slots"_a, nb::call_guard<Unlocked>())
      .def("recover", &SlotTable::recover, "replay"_a, nb::call_guard<Unlocked>())
      .def(
          "find",
          [](const SlotTable& self, const nb::bytes& key) { return self.find(to_key(key)); },
          "key"_a)
      .def("lookup", &lookup, "keys"_a)
      .def("last", &last, "keys"_a, "first"_a, "end"_a, "tags"_a)
      .def("epoch", &SlotTable::epoch, "slot"_a)
      .def(
          "epochs",
          [](const SlotTable& self, const Slots& slots) {
            std::vector<int64_t> epochs(slots.shape(0));
            for (size_t i = 0; i < epochs.size(); ++i) epochs[i] = self.epoch(slots.data()[i]);
            return to_numpy(std::move(epochs));
          },
          "slots"_a)
      .def(
          "state",
          [](const SlotTable& self, int64_t slot) { return static_cast<int>(self.state(slot)); },
          "slot"_a)
      .def(
          "key", [](const SlotTable& self, int64_t slot) { return to_bytes(self.key(slot)); },
          "slot"_a)
      .def(
          "usage",
          [](const SlotTable& self, int64_t first, size_t n) {
            const ssdkv::Usage found = self.usage(first, n);
            return nb::make_tuple(found.ready, found.masked, found.pinned, found.obtainable);
          },
          "first"_a, "n"_a)
      .def("order", [](const SlotTable& self) { return to_numpy(self.order()); })
      .def("free_slots", [](const SlotTable& self) { return to_numpy(self.free_slots()); })
      .def("allocate", &allocate, "n"_a)
      .def(
          "touch",
          [](SlotTable& self, const Slots& slots) { self.touch(slots.data(), slots.shape(0)); },
          "slots"_a)
      .def(
          "retain",
          [](SlotTable& self, const Slots& slots, uint32_t until, size_t most) {
            self.retain(slots.data(), slots.shape(0), until, most);
          },
          "slots"_a, "until"_a, "most"_a)
      .def("expire", &SlotTable::expire, "now"_a)
      .def(
          "pin",
          [](SlotTable& self, const Slots& slots) { self.pin(slots.data(), slots.shape(0)); },
          "slots"_a)
      .def(
          "unpin",
          [](SlotTable& self, const Slots& slots) { self.unpin(slots.data(), slots.shape(0)); },
          "slots"_a)
      .def(
          "publish",
          [](SlotTable& self, int64_t slot, const nb::bytes& key) {
            return self.publish(slot, to_key(key));
          },
          "slot"_a, "key"_a)
      .def("durable", &durable, "slots"_a)
      .def("replace", &replace, "old"_a, "new"_a)
      .def(
          "retire",
          [](SlotTable& self, const Slots& slots) {
            Gone gone;
            self.retire(slots.data(), slots.shape(0), gone);
            return to_tuple(std::move(gone));
          },
          "slots"_a)
      .def(
          "drop",
          [](SlotTable& self, const Slots& slots) {
            Gone gone;
            self.drop(slots.data(), slots.shape(0), gone);
            return to_tuple(std::move(gone));
          },
          "slots"_a)
      .def(
          "quarantine",
          [](SlotTable& self, const Slots& slots) {
            Gone gone;
            const size_t dropped = self.quarantine(slots.data(), slots.shape(0), gone);
            return nb::make_tuple(dropped, to_numpy(std::move(gone.slots)),
                                  to_numpy(std::move(gone.epochs)));
          },
          "slots"_a)
      .def(
          "mask",
          [](SlotTable& self, const Slots& slots) {
            return self.mask(slots.data(), slots.shape(0));
          },
          "slots"_a)
      .def(
          "unmask",
          [](SlotTable& self, const Slots& slots) {
            return self.unmask(slots.data(), slots.shape(0));
          },
          "slots"_a)
      .def(
          "restore",
          [](SlotTable& self, const Slots& slots) { self.restore(slots.data(), slots.shape(0)); },
          "slots"_a)
      .def(
          "defer",
          [](SlotTable& self, const ArrayIn<bool>& mask) {
            if (mask.shape(0) != self.num_slots()) {
              throw std::invalid_argument("mask of " + std::to_string(mask.shape(0)) + " for " +
                                          std::to_string(self.num_slots()) + " slots");
            }
            self.defer(mask.data());
          },
          "mask"_a.noconvert())
      .def("set_last_epoch", &SlotTable::set_last_epoch, "epoch"_a)
      .def("begin_walk", &SlotTable::begin_walk, nb::call_guard<Unlocked>())
      .def("walk", &walk, "first_sequence"_a, "budget"_a = kWalkBudget)
      .def_prop_ro("obtainable", &SlotTable::obtainable)
      .def_prop_ro("free", &SlotTable::free)
      .def_prop_ro("deferred", &SlotTable::deferred)
      .def_prop_ro("evictable", &SlotTable::evictable)
      .def_prop_ro("ready", &SlotTable::ready)
      .def_prop_ro("journalled", &SlotTable::journalled)
      .def_prop_ro("writing", &SlotTable::writing)
      .def_prop_ro("pinned", &SlotTable::pinned)
      .def_prop_ro("lost", &SlotTable::lost)
      .def_prop_ro("masked", &SlotTable::masked)
      .def_prop_ro("retained", &SlotTable::retained)
      .def_prop_ro("nbytes", &SlotTable::nbytes)
      .def("counts", &counts);
}

}  // namespace
}  // namespace ssdkv

NB_MODULE(_index, m) {
  m.doc() = "Index of the slots, and records of the journal.";
  nb::set_leak_warnings(false);  // an index may live as long as its process
  m.def("encode_records", &ssdkv::encode_records, "kind"_a, "slots"_a, "epochs"_a, "keys"_a.none(),
        "first_sequence"_a);
  ssdkv::bind_replay(m);
  ssdkv::bind_table(m);
}
