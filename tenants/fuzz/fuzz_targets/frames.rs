//! Any bytes give a frame within its limits, or an error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenants::transport::Limits;
use tenants::transport::frame::{HEAD_BYTES, Header, decode};
use tenants::wire::{Reply, Request};

fuzz_target!(|bytes: &[u8]| {
    let head = &Header { fds: 0, payload_bytes: 0 }.encode()[..HEAD_BYTES];
    // As it is, and behind today's magic and version: an input is tied to no version.
    for frame in [bytes, &[head, bytes].concat()] {
        let _request = decode::<Request>(frame, Limits::REQUESTS);
        let _reply = decode::<Reply>(frame, Limits::ALL);
        let Some((header, _payload)) = frame.split_first_chunk() else {
            continue;
        };
        if let Ok(read) = Header::decode(*header, Limits::REQUESTS) {
            assert!(read.fds <= Limits::REQUESTS.fds_max);
            assert!(read.payload_bytes <= Limits::REQUESTS.payload_bytes_max);
            assert_eq!(read.encode(), *header);
        }
    }
});
