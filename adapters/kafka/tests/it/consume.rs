//! Reading what rdkafka's own types cannot express: header names that are no text.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::ptr;
use std::time::Duration;

use bytes::Bytes;
use inboxd_conformance::letters::SeenCopy;
use rdkafka::Message;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::BorrowedMessage;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka_sys as sys;

use crate::support::PATIENCE;

/// All records of a topic's first partition, from its beginning to its present end. Blocks.
pub fn read_all(brokers: &str, topic: &str) -> Vec<SeenCopy> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "reads-all")
        .set("enable.auto.commit", "false")
        .create()
        .expect("a consumer can be made");
    let (low, high) = consumer.fetch_watermarks(topic, 0, PATIENCE).expect("an answer");
    let mut place = TopicPartitionList::new();
    place.add_partition_offset(topic, 0, Offset::Offset(low)).expect("an offset");
    consumer.assign(&place).expect("assigned");
    let mut copies = Vec::new();
    let mut next = low;
    while next < high {
        let message = consumer.poll(Duration::from_secs(30)).expect("a record in time");
        let message = message.expect("no error");
        next = message.offset() + 1;
        let bytes = |bytes: Option<&[u8]>| bytes.map(Bytes::copy_from_slice);
        copies.push(SeenCopy {
            key: bytes(message.key()),
            headers: headers(&message),
            body: bytes(message.payload()),
        });
    }
    copies
}

fn headers(message: &BorrowedMessage<'_>) -> Vec<(Bytes, Option<Bytes>)> {
    let mut list = ptr::null_mut();
    let mut headers = Vec::new();
    // SAFETY: message and headers are alive; librdkafka ends names with a NUL; a value that is not
    // null has `size` bytes.
    unsafe {
        sys::rd_kafka_message_headers(message.ptr(), &mut list);
        if list.is_null() {
            return headers;
        }
        for index in 0..sys::rd_kafka_header_cnt(list) {
            let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
            sys::rd_kafka_header_get_all(list, index, &mut name, &mut value, &mut size);
            let name = Bytes::copy_from_slice(CStr::from_ptr(name).to_bytes());
            let value = (!value.is_null()).then(|| {
                Bytes::copy_from_slice(std::slice::from_raw_parts(value.cast::<u8>(), size))
            });
            headers.push((name, value));
        }
    }
    headers
}
