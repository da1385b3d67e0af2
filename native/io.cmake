# Sources of the SSD engines and buffers.
set(LOHAN_IO_SOURCES
  native/src/aligned_memory.cpp
  native/src/bind_buffers.cpp
  native/src/bind_io.cpp
  native/src/crc32c.cpp
  native/src/drive.cpp
  native/src/drive_queue.cpp
  native/src/io_engine.cpp
  native/src/mover_threads.cpp
  native/src/mover_uring.cpp
  native/src/transfer.cpp
  native/src/uring.cpp)
