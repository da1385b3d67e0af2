# Sources of the SSD engines and buffers.
set(LOHAN_IO_SOURCES native/src/bind_io.cpp)
