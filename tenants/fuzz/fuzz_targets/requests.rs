//! Any bytes give a request or an error, and a request survives being sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenants::transport::Limits;
use tenants::transport::frame::{HEADER_BYTES, decode, decode_payload, encode};
use tenants::wire::Request;

fuzz_target!(|bytes: &[u8]| {
    // The frame as it is, and its payload alone: a mutation seldom leaves the header's length right.
    let framed = decode::<Request>(bytes, Limits::REQUESTS).ok();
    let payload = bytes.get(HEADER_BYTES..).unwrap_or_default();
    for message in framed.into_iter().chain(decode_payload(payload).ok()) {
        let frame = encode(&message, 0).expect("what was decoded can be encoded");
        let again =
            decode::<Request>(&frame, Limits::ALL).expect("what was encoded can be decoded");
        assert_eq!(again, message);
    }
});
