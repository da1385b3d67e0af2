// Streams and events: a stream is a queue of jobs and the thread that runs them in order.
//
// A job that fails is remembered, and whatever is asked of the device from then on fails with it,
// as on a GPU. Streams and their threads live as long as the process.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace testgpu {

using c10::Device;
using c10::DeviceIndex;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

std::mutex error_mutex;
std::string first_error;  // of a queued job

/// As every call of a GPU's runtime does once a kernel has failed.
void raise_error() {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (!first_error.empty())
    throw c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, 700, "test accelerator failed: " + first_error);
}

/// One stream.
class Worker {
 public:
  Worker() { std::thread([this] { run(); }).detach(); }

  void put(std::function<void()> job, bool is_work = false) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.emplace_back(std::move(job), is_work);
      ++num_put_;
    }
    work_.notify_one();
  }

  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto target = num_put_;
    done_.wait(lock, [&] { return num_done_ >= target; });
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_done_ == num_put_;
  }

  std::atomic<int64_t> delay_us{0};  // before every kernel and copy, to make races sure
  std::shared_ptr<struct Point> gate;  // what the stream is held at, if it is
  std::atomic<int64_t> num_jobs{0};
  std::atomic<int64_t> busy_us{0};  // at kernels and copies, not at waiting
  std::atomic<double> bytes_per_second{0};  // of copies between the sides; 0: as they come

  /// The work since the last call takes at least so long, as if the device were no faster.
  void pace(int64_t nanoseconds) {
    put([this, nanoseconds] {
      if (!piece_began_ && nanoseconds == 0) return;
      const auto began = piece_began_.value_or(std::chrono::steady_clock::now());
      std::this_thread::sleep_until(began + std::chrono::nanoseconds(nanoseconds));
      piece_began_.reset();
      piece_ended_ = std::chrono::steady_clock::now();
    });
  }

  /// Microseconds without work between each two pieces so far, which are then forgotten.
  std::vector<double> take_gaps() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(gaps_us_, {});
  }

 private:
  void begin_piece() {
    if (piece_began_) return;
    piece_began_ = std::chrono::steady_clock::now();
    if (!piece_ended_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    gaps_us_.push_back(
        std::chrono::duration<double, std::micro>(*piece_began_ - *piece_ended_).count());
  }

  void run() {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    while (true) {
      std::function<void()> job;
      bool is_work = false;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [&] { return !jobs_.empty(); });
        std::tie(job, is_work) = std::move(jobs_.front());
        jobs_.pop_front();
      }
      const auto began = std::chrono::steady_clock::now();
      if (is_work) begin_piece();
      if (delay_us && is_work) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      try {
        job();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (first_error.empty()) first_error = error.what();
      }
      job = nullptr;
      ++num_jobs;
      if (is_work)
        busy_us += std::chrono::duration_cast<std::chrono::microseconds>(
                       std::chrono::steady_clock::now() - began).count();
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++num_done_;
      }
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<std::pair<std::function<void()>, bool>> jobs_;
  uint64_t num_put_ = 0, num_done_ = 0;
  std::vector<double> gaps_us_;
  // Of the thread alone: the piece of work under way, and the end of the last one.
  std::optional<std::chrono::steady_clock::time_point> piece_began_, piece_ended_;
};

std::mutex workers_mutex;
std::vector<Worker*>& workers() {
  static auto* all = new std::vector<Worker*>{new Worker()};  // leaked: threads run to the end
  return *all;
}
Worker& worker(int64_t stream) {
  std::lock_guard<std::mutex> lock(workers_mutex);
  return *workers().at(stream);
}
thread_local int64_t current_stream = 0;
thread_local DeviceIndex current_device = 0;

/// One recording of an event.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::chrono::steady_clock::time_point finished;
  void finish() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      finished = std::chrono::steady_clock::now();
      is_done = true;
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_done; });
  }
  bool done() {
    std::lock_guard<std::mutex> lock(mutex);
    return is_done;
  }
};
struct EventState {
  std::shared_ptr<Point> point;
};

std::shared_ptr<Point> record_on(int64_t stream) {
  auto point = std::make_shared<Point>();
  worker(stream).put([point] { point->finish(); });
  return point;
}

/// What torch asks of streams, events and the current device.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device d) const override {
    auto old = current_device;
    current_device = d.index() < 0 ? old : d.index();
    return Device(kDevice, old);
  }
  Device getDevice() const override { return Device(kDevice, current_device); }
  void setDevice(Device d) const override { exchangeDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override { setDevice(d); }
  c10::Stream stream_of(int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kDevice, 0), id);
  }
  c10::Stream getStream(Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return stream_of(0); }
  c10::Stream getNewStream(Device, int) const override {
    std::lock_guard<std::mutex> lock(workers_mutex);
    workers().push_back(new Worker());
    return stream_of(static_cast<int64_t>(workers().size()) - 1);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = current_stream;
    current_stream = s.id();
    return stream_of(old);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& s, DeviceIndex, c10::EventFlag) const override {
    raise_error();
    if (*event == nullptr) *event = new EventState();
    static_cast<EventState*>(*event)->point = record_on(s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    raise_error();
    if (event == nullptr) return;
    auto point = static_cast<EventState*>(event)->point;
    if (point) worker(s.id()).put([point] { point->wait(); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    raise_error();
    auto point = static_cast<EventState*>(event)->point;
    return !point || point->done();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto point = static_cast<EventState*>(event)->point;
    if (point) point->wait();
    raise_error();
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    const auto begin = static_cast<EventState*>(first)->point;
    const auto end = static_cast<EventState*>(second)->point;
    TORCH_CHECK(begin->done() && end->done(), "an event whose time is asked for is not done");
    return std::chrono::duration<double, std::milli>(end->finished - begin->finished).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  bool queryStream(const c10::Stream& s) const override { return worker(s.id()).is_idle(); }
  void synchronizeStream(const c10::Stream& s) const override {
    worker(s.id()).drain();
    raise_error();
  }
  void synchronizeDevice(DeviceIndex) const override;
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override;
};

void drain_all() {
  std::vector<Worker*> all;
  {
    std::lock_guard<std::mutex> lock(workers_mutex);
    all = workers();
  }
  for (auto* one : all) one->drain();
}
void Guard::synchronizeDevice(DeviceIndex) const {
  drain_all();
  raise_error();
}

}  // namespace testgpu
