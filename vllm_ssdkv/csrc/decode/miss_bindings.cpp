#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/unlocked.hpp"
#include "decode/miss_service.hpp"
#include "io/bindings.hpp"
#include "io/engine/threads/threads_engine.hpp"
#if SSDKV_URING
#include "io/engine/uring/uring_engine.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

template <class T, size_t Dims>
using Table = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// With the arrays that it points into.
struct BoundPages : StoredPages {
  BoundPages(const PageLayout& layout, uint64_t arena_address, size_t payload,
             const ArrayIn<int32_t>& rows, const Table<uint64_t, 2>& openings,
             const Table<uint64_t, 3>& page_marks)
      : StoredPages{layout,
                    arena_address,
                    page_marks.shape(1),
                    payload,
                    {rows.data(), openings.data(), page_marks.data(), openings.shape(1),
                     page_marks.shape(2)}},
        row_of_(rows),
        opening_(openings),
        marks_(page_marks) {}

 private:
  ArrayIn<int32_t> row_of_;
  Table<uint64_t, 2> opening_;
  Table<uint64_t, 3> marks_;
};

template <class Engine>
MissService::Submit submit_to(nb::handle engine, bool joined) {
  Engine* const native = nb::cast<Engine*>(engine);
  return [native, joined](const RequestArrays& arrays) {
    return native->submit(Op::kRead, arrays, joined);
  };
}

MissService::Submit to_submit(nb::handle engine, bool joined) {
  if (nb::isinstance<ThreadsEngine>(engine)) return submit_to<ThreadsEngine>(engine, joined);
#if SSDKV_URING
  if (nb::isinstance<UringEngine>(engine)) return submit_to<UringEngine>(engine, joined);
#endif
  return {};
}

class BoundService {
 public:
  BoundService(PageCache& cache, const Mailbox& mail, std::shared_ptr<const BoundPages> stored,
               nb::handle engine, bool joined, double deadline_s)
      : stored_(std::move(stored)),
        service_(cache, mail, *stored_, to_submit(engine, joined), deadline_s) {}

  ~BoundService() { close(); }
  BoundService(const BoundService&) = delete;
  BoundService& operator=(const BoundService&) = delete;

  int64_t arm(std::vector<ArrayIn<int64_t>> rows, std::shared_ptr<const Stripes> stripes) {
    std::vector<std::span<const int64_t>> slots;
    for (const auto& row : rows) slots.push_back(span(row));
    const std::vector<ArrayIn<int64_t>> before = std::exchange(rows_, std::move(rows));
    const Unlocked unlocked;
    return service_.arm(std::move(slots), std::move(stripes));
  }

  Served disarm() {
    const Unlocked unlocked;
    return service_.disarm();
  }

  uint64_t answered() const { return service_.answered(); }

  nb::object next(double timeout_s) {
    std::optional<SlowRead> work;
    {
      const Unlocked unlocked;
      work = service_.next(deadline_after(timeout_s));
    }
    if (!work) return nb::none();
    return nb::make_tuple(to_numpy(std::move(work->keys)), to_numpy(std::move(work->places)));
  }

  void answer(const ArrayIn<uint8_t>& states, const ArrayIn<uint16_t>& devices) {
    if (states.shape(0) != devices.shape(0)) {
      throw std::invalid_argument("states and devices differ in length");
    }
    service_.answer(span(states), span(devices));
  }

  void close() {
    const Unlocked unlocked;
    service_.close();
  }

 private:
  const std::shared_ptr<const BoundPages> stored_;
  std::vector<ArrayIn<int64_t>> rows_;
  MissService service_;
};

nb::list overdue_of(const Served& served) {
  nb::list found;
  for (const OverdueRead& read : served.overdue) {
    found.append(nb::make_tuple(read.batch, to_numpy(read.device), to_numpy(read.length)));
  }
  return found;
}

}  // namespace

void bind_miss_service(nb::module_& m) {
  nb::class_<Mailbox>(m, "Mailbox", R"(Memory by which a device asks for pages, and is answered.

``requests`` and ``replies`` are addresses of int64 ``[2, 2 + most]``, for steps in turn: ticket,
count, then a key for each page; ticket, pages lost, then the address of each page or 0. A key is the
row times ``blocks``, plus the block, times ``layer_pages``, plus the page's number in the layer; a
negative one asks for nothing.)")
      .def(
          "__init__",
          [](Mailbox* mail, uint64_t requests, uint64_t replies, int64_t most, int64_t layers,
             int64_t blocks, int64_t layer_pages) {
            if (most < 1 || layers < 1 || blocks < 1 || layer_pages < 1) {
              throw std::invalid_argument("a mailbox has room, and tables have sizes");
            }
            new (mail) Mailbox{reinterpret_cast<int64_t*>(requests),
                               reinterpret_cast<int64_t*>(replies),
                               most,
                               layers,
                               blocks,
                               layer_pages};
          },
          "requests"_a, "replies"_a, "most"_a, "layers"_a, "blocks"_a, "layer_pages"_a)
      .def_ro("most", &Mailbox::most, "Pages of a request, at most.");

  nb::class_<BoundPages>(m, "StoredPages", R"(Places of pages, and digests that these are right by.

``row_of [slots]``: row of each slot's digests, -1 for none; ``opening [rows, words]``, of no words
where nothing is encrypted, and ``marks [rows, pages, words]``.)")
      .def(
          "__init__",
          [](BoundPages* pages, uint64_t address, uint64_t page_bytes, uint64_t header_bytes,
             uint64_t arena, size_t payload_bytes, const ArrayIn<int32_t>& row_of,
             const Table<uint64_t, 2>& opening, const Table<uint64_t, 3>& marks) {
            new (pages) BoundPages({address, page_bytes, header_bytes}, arena, payload_bytes,
                                   row_of, opening, marks);
          },
          "address"_a, "page_bytes"_a, "header_bytes"_a, "arena"_a, "payload_bytes"_a,
          "row_of"_a.noconvert(), "opening"_a.noconvert(), "marks"_a.noconvert());

  nb::class_<Served>(m, "Served", "Outcome of the requests of a step.")
      .def_ro("held", &Served::held, "Distinct pages that the cache had.")
      .def_ro("read", &Served::read, "Distinct pages that were read.")
      .def_ro("slow", &Served::slow, "Distinct pages that the slow lane has read.")
      .def_ro("lost", &Served::lost, "Pages without an answer.")
      .def_ro("bytes", &Served::bytes, "Bytes that the fast lane has read from each device.")
      .def_prop_ro(
          "places", [](const Served& served) { return to_numpy(served.places); },
          nb::rv_policy::automatic, "Places of the latest request, which are taken.")
      .def_prop_ro("overdue", &overdue_of, nb::rv_policy::automatic,
                   nb::sig("def overdue(self) -> list[tuple[Batch, NDArray[numpy.uint16], "
                           "NDArray[numpy.uint32]]]"),
                   "Reads that missed their deadline: device and length of each request.");

  nb::class_<BoundService>(m, "MissService", R"(Answers to a device that lacks pages in a step.

A thread takes requests in the order of their tickets. Between :meth:`arm` and :meth:`disarm` nobody
else uses the ``cache``. Pages are read by the ``engine`` if that is a native one, and if that fails
by who calls :meth:`next` and :meth:`answer`. A request is answered within twice ``deadline_s``.)")
      .def(nb::init<PageCache&, const Mailbox&, std::shared_ptr<const BoundPages>, nb::handle, bool,
                    double>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), "cache"_a, "mail"_a, "stored"_a,
           "engine"_a.none(), "joined"_a, "deadline_s"_a)
      .def("arm", &BoundService::arm, "rows"_a.noconvert(), "stripes"_a.none(),
           R"(Begin a step whose rows have these slots; ``stripes`` None: all is read slowly.

Tickets of the step are counted from the answer; 0: the service has ended.)")
      .def("disarm", &BoundService::disarm, "End the step, after the request under way.")
      .def_prop_ro("answered", &BoundService::answered, "Requests answered since the start.")
      .def("next", &BoundService::next, "timeout_s"_a,
           nb::sig("def next(self, timeout_s: float) -> "
                   "tuple[NDArray[numpy.int64], NDArray[numpy.int32]] | None"),
           "Keys of pages to be read, and their places; None: there are none in this time.")
      .def("answer", &BoundService::answer, "states"_a.noconvert(), "devices"_a.noconvert(),
           R"(Answer to :meth:`next`, of each page: 0 it did not come, 1 it is right, 2 it did not
come, and the caller keeps its place; and the device.)")
      .def("close", &BoundService::close, "End the thread.");
}

}  // namespace ssdkv
