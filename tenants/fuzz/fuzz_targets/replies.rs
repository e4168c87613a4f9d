//! Any bytes give a reply or an error, and a reply survives being sent.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tenants::transport::Limits;
use tenants::transport::frame::{HEADER_BYTES, decode, decode_payload, encode};
use tenants::wire::Reply;

fuzz_target!(|bytes: &[u8]| {
    // The frame as it is, and its payload alone: a mutation seldom leaves the header's length right.
    let framed = decode::<Reply>(bytes, Limits::ALL).ok();
    let payload = bytes.get(HEADER_BYTES..).unwrap_or_default();
    for message in framed.into_iter().chain(decode_payload(payload).ok()) {
        let frame = encode(&message, 0).expect("what was decoded can be encoded");
        let again = decode::<Reply>(&frame, Limits::ALL).expect("what was encoded can be decoded");
        assert_eq!(again, message);
    }
});
