//! The few calls of librdkafka that have no safe wrapper in rdkafka 0.39.
//!
//! Purpose: headers as bytes, read and produced (the wrapper takes every name for UTF-8 and panics
//! otherwise), commits whose answer can be waited for with a bound, metadata of committed offsets as
//! bytes, and topic ids.
//!
//! Invariants: every pointer comes from a live rdkafka object that outlives the call, and
//! nothing borrowed from librdkafka leaves a function. This is the only module of the crate
//! with unsafe code.

#![allow(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use inboxd_contract::Header;
use rdkafka::IntoOpaque as _;
use rdkafka::Message as _;
use rdkafka::TopicPartitionList;
use rdkafka::client::{Client, ClientContext};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::BorrowedMessage;
use rdkafka::producer::ProducerContext;
use rdkafka_sys as sys;
use rdkafka_sys::rd_kafka_resp_err_t::{RD_KAFKA_RESP_ERR__NOENT, RD_KAFKA_RESP_ERR_NO_ERROR};
use rdkafka_sys::rd_kafka_vtype_t as vtype;

/// All headers in order, names and values as bytes, null values as `None`.
pub(crate) fn headers(message: &BorrowedMessage<'_>) -> Vec<Header> {
    let mut list = ptr::null_mut();
    // SAFETY: the message is alive, and so are its headers, which belong to it.
    let found = unsafe { sys::rd_kafka_message_headers(message.ptr(), &mut list) };
    match found {
        RD_KAFKA_RESP_ERR_NO_ERROR if !list.is_null() => {}
        RD_KAFKA_RESP_ERR_NO_ERROR | RD_KAFKA_RESP_ERR__NOENT => return Vec::new(),
        // More than librdkafka takes, or cut short: the record goes on, and says what it lacks.
        _ => {
            tracing::warn!(
                topic = message.topic(),
                partition = message.partition(),
                offset = message.offset(),
                "the headers of a record cannot be read"
            );
            return vec![Header::new("x-malformed-headers", Bytes::new())];
        }
    }
    // SAFETY: as above.
    let count = unsafe { sys::rd_kafka_header_cnt(list) };
    // One allocation for all names and values: those of a byte would cost thirty each.
    let mut bytes = BytesMut::new();
    let mut spans = Vec::with_capacity(count);
    for index in 0..count {
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        // SAFETY: the list is alive; the three out-pointers are valid.
        let found =
            unsafe { sys::rd_kafka_header_get_all(list, index, &mut name, &mut value, &mut size) };
        if found != RD_KAFKA_RESP_ERR_NO_ERROR || name.is_null() {
            break;
        }
        // SAFETY: librdkafka ends names with a NUL and keeps them as long as the message.
        bytes.extend_from_slice(unsafe { CStr::from_ptr(name) }.to_bytes());
        let named = bytes.len();
        // SAFETY: a value that is not null has `size` bytes.
        let value = unsafe { bytes_of(value, size) };
        bytes.extend_from_slice(value.unwrap_or_default());
        spans.push((named, value.is_some().then_some(bytes.len())));
    }
    let (bytes, mut start) = (bytes.freeze(), 0);
    let headers = spans.into_iter().map(|(named, valued)| {
        let name = bytes.slice(start..named);
        start = valued.unwrap_or(named);
        Header { name, value: valued.map(|end| bytes.slice(named..end)) }
    });
    headers.collect()
}

/// A header to produce: a name of any bytes, a value or null.
pub(crate) type OutgoingHeader<'a> = (Cow<'a, [u8]>, Option<Cow<'a, [u8]>>);

/// A record to produce. `None` is null, which is not empty.
pub(crate) struct Outgoing<'a> {
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) body: Option<&'a [u8]>,
    /// In order; names may repeat.
    pub(crate) headers: &'a [OutgoingHeader<'a>],
}

/// Queues a record, to the partition that its key stands for. Never blocks. Its report comes with
/// `opaque`, unless this fails: then `opaque` is dropped.
pub(crate) fn produce<C: ProducerContext>(
    client: &Client<C>,
    topic: &CStr,
    record: &Outgoing<'_>,
    opaque: C::DeliveryOpaque,
) -> Result<(), RDKafkaErrorCode> {
    let unit = |bytes: Option<&[u8]>| {
        let (start, size) = memory(bytes);
        sys::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 { ptr: start.cast_mut(), size }
    };
    // SAFETY: topic, key, body, names and values outlive the call, which copies them
    // (RD_KAFKA_MSG_F_COPY); on success the headers are the record's own, else they are destroyed
    // here; the opaque pointer is given back by the record's report, else taken back here.
    unsafe {
        let headers = sys::rd_kafka_headers_new(record.headers.len());
        for (name, value) in record.headers {
            let (start, size) = memory(value.as_deref());
            sys::rd_kafka_header_add(
                headers,
                name.as_ptr().cast(),
                name.len().cast_signed(),
                start,
                size.cast_signed(),
            );
        }
        let opaque = opaque.into_ptr();
        let mut units =
            [sys::rd_kafka_vu_t { vtype: vtype::RD_KAFKA_VTYPE_END, u: std::mem::zeroed() }; 6];
        units[0].vtype = vtype::RD_KAFKA_VTYPE_TOPIC;
        units[0].u.cstr = topic.as_ptr();
        units[1].vtype = vtype::RD_KAFKA_VTYPE_VALUE;
        units[1].u.mem = unit(record.body);
        units[2].vtype = vtype::RD_KAFKA_VTYPE_KEY;
        units[2].u.mem = unit(record.key);
        units[3].vtype = vtype::RD_KAFKA_VTYPE_MSGFLAGS;
        units[3].u.i = sys::RD_KAFKA_MSG_F_COPY as c_int;
        units[4].vtype = vtype::RD_KAFKA_VTYPE_OPAQUE;
        units[4].u.ptr = opaque;
        units[5].vtype = vtype::RD_KAFKA_VTYPE_HEADERS;
        units[5].u.headers = headers;
        let error = sys::rd_kafka_produceva(client.native_ptr(), units.as_ptr(), units.len());
        if error.is_null() {
            return Ok(());
        }
        let code = sys::rd_kafka_error_code(error);
        sys::rd_kafka_error_destroy(error);
        sys::rd_kafka_headers_destroy(headers);
        drop(C::DeliveryOpaque::from_ptr(opaque));
        Err(code.into())
    }
}

fn memory(bytes: Option<&[u8]>) -> (*const c_void, usize) {
    bytes.map_or((ptr::null(), 0), |bytes| (bytes.as_ptr().cast(), bytes.len()))
}

/// A commit that was sent and is not answered yet. Dropped: the answer is not waited for.
pub(crate) struct PendingCommit {
    queue: *mut sys::rd_kafka_queue_t,
}

/// One partition of a commit's answer.
pub(crate) struct CommittedPartition {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) error: Option<RDKafkaErrorCode>,
}

impl PendingCommit {
    /// Sends a commit of these offsets (with their metadata).
    pub(crate) fn send<C: ClientContext>(
        client: &Client<C>,
        offsets: &TopicPartitionList,
    ) -> Result<Self, RDKafkaErrorCode> {
        // SAFETY: the client is alive; the queue is owned by the value made here.
        let commit = Self { queue: unsafe { sys::rd_kafka_queue_new(client.native_ptr()) } };
        // SAFETY: client, list and queue are alive; librdkafka copies the list and holds a
        // reference of its own to the queue; without a callback the answer is an event.
        let sent = unsafe {
            sys::rd_kafka_commit_queue(
                client.native_ptr(),
                offsets.ptr(),
                commit.queue,
                None,
                ptr::null_mut(),
            )
        };
        match sent {
            RD_KAFKA_RESP_ERR_NO_ERROR => Ok(commit),
            error => Err(error.into()),
        }
    }

    /// The answer, if it comes within `timeout`: an error as a whole, or one for each partition.
    pub(crate) fn answer(
        &self,
        timeout: Duration,
    ) -> Option<Result<Vec<CommittedPartition>, RDKafkaErrorCode>> {
        // SAFETY: the queue is alive.
        let event = unsafe { Event::poll(self.queue, timeout) }?;
        // SAFETY: the event is alive until the end of this function.
        let error = unsafe { sys::rd_kafka_event_error(event.0) };
        // SAFETY: as above; the list belongs to the event.
        let list = unsafe { sys::rd_kafka_event_topic_partition_list(event.0) };
        // SAFETY: null or a list that lives as long as the event.
        let partitions: Vec<_> = unsafe { elements(list) }
            .iter()
            .map(|element| CommittedPartition {
                // SAFETY: a topic's name is a string that lives as long as the list.
                topic: unsafe { text(element.topic) },
                partition: element.partition,
                error: (element.err != RD_KAFKA_RESP_ERR_NO_ERROR).then(|| element.err.into()),
            })
            .collect();
        let partial = partitions.iter().any(|partition| partition.error.is_none());
        match error {
            RD_KAFKA_RESP_ERR_NO_ERROR => Some(Ok(partitions)),
            // One partition's error is repeated as the answer's: the others were committed.
            _ if partial && partitions.iter().any(|partition| partition.error.is_some()) => {
                Some(Ok(partitions))
            }
            error => Some(Err(error.into())),
        }
    }
}

impl Drop for PendingCommit {
    fn drop(&mut self) {
        // SAFETY: made by `send`, destroyed once.
        unsafe { sys::rd_kafka_queue_destroy(self.queue) }
    }
}

/// The metadata of each partition that has some, as bytes: other members may have stored
/// what is not UTF-8.
pub(crate) fn metadata(list: &TopicPartitionList) -> Vec<(String, i32, Vec<u8>)> {
    // SAFETY: the list is alive.
    unsafe { elements(list.ptr()) }
        .iter()
        .filter_map(|element| {
            // SAFETY: metadata that is not null has `metadata_size` bytes.
            let metadata = unsafe { bytes_of(element.metadata, element.metadata_size) }?;
            // SAFETY: a topic's name is a string that lives as long as the list.
            Some((unsafe { text(element.topic) }, element.partition, metadata.to_vec()))
        })
        .collect()
}

/// Why a topic's id is not known, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TopicIdError {
    /// The cluster did not answer: ask again.
    NoAnswer(String),
    /// It answered that there is no such topic.
    NotThere(String),
    /// It answered that we may not know the topic.
    Forbidden(String),
    /// It answered that it gives topics no ids.
    NoId(String),
}

impl TopicIdError {
    /// The words.
    pub(crate) fn words(&self) -> &str {
        let (Self::NoAnswer(words)
        | Self::NotThere(words)
        | Self::Forbidden(words)
        | Self::NoId(words)) = self;
        words
    }
}

/// The ids of topics, each in base64url, or why not.
pub(crate) type TopicIds = HashMap<String, Result<String, TopicIdError>>;

/// A question for the ids of topics that was sent and is not answered yet. Dropped: the answer
/// is not waited for. It is dropped before its client is.
pub(crate) struct PendingTopicIds {
    queue: *mut sys::rd_kafka_queue_t,
}

impl PendingTopicIds {
    /// Asks. An answer, if only that there is none, comes after `timeout` at the latest.
    pub(crate) fn send<C: ClientContext>(
        client: &Client<C>,
        topics: &[&str],
        timeout: Duration,
    ) -> Self {
        Self::ask(client, topics, timeout, false)
    }

    /// The same; with `operations`, what this user may do to each is asked for too.
    fn ask<C: ClientContext>(
        client: &Client<C>,
        topics: &[&str],
        timeout: Duration,
        operations: bool,
    ) -> Self {
        let names: Vec<CString> =
            topics.iter().filter_map(|topic| CString::new(*topic).ok()).collect();
        let mut pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut words = [0_u8; 512];
        // SAFETY: the client is alive; the names outlive the collection, which copies them;
        // options and collection are copied by the call and destroyed after it; librdkafka holds
        // a reference of its own to the queue, which is owned by the value made here.
        unsafe {
            let rk = client.native_ptr();
            let options = sys::rd_kafka_AdminOptions_new(
                rk,
                sys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
            );
            let _ = sys::rd_kafka_AdminOptions_set_request_timeout(
                options,
                milliseconds(timeout),
                words.as_mut_ptr().cast(),
                words.len(),
            );
            if operations {
                let error =
                    sys::rd_kafka_AdminOptions_set_include_authorized_operations(options, 1);
                if !error.is_null() {
                    sys::rd_kafka_error_destroy(error);
                }
            }
            let collection =
                sys::rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
            let queue = sys::rd_kafka_queue_new(rk);
            sys::rd_kafka_DescribeTopics(rk, collection, options, queue);
            sys::rd_kafka_TopicCollection_destroy(collection);
            sys::rd_kafka_AdminOptions_destroy(options);
            Self { queue }
        }
    }

    /// The answer, if it comes within `timeout`. It comes once.
    pub(crate) fn poll(&self, timeout: Duration) -> Option<Result<TopicIds, TopicIdError>> {
        // SAFETY: the queue lives as long as `self`.
        let event = unsafe { Event::poll(self.queue, timeout) }?;
        Some(described(&event))
    }
}

impl Drop for PendingTopicIds {
    fn drop(&mut self) {
        // SAFETY: made by `send`, destroyed once.
        unsafe { sys::rd_kafka_queue_destroy(self.queue) }
    }
}

/// Whether this user may write to a topic; `None` where the cluster does not say. Blocks for
/// `timeout` at the longest.
pub(crate) fn may_write<C: ClientContext>(
    client: &Client<C>,
    topic: &str,
    timeout: Duration,
) -> Option<bool> {
    let asked = PendingTopicIds::ask(client, &[topic], timeout, true);
    // SAFETY: queue, event and everything that belongs to it are alive until the end.
    unsafe {
        let event = Event::poll(asked.queue, timeout)?;
        let result = sys::rd_kafka_event_DescribeTopics_result(event.0);
        if result.is_null() {
            return None;
        }
        let mut count = 0;
        let topics = sys::rd_kafka_DescribeTopics_result_topics(result, &mut count);
        if count == 0 {
            return None;
        }
        let mut operations = 0;
        let list = sys::rd_kafka_TopicDescription_authorized_operations(*topics, &mut operations);
        if list.is_null() || operations == 0 {
            return None;
        }
        let list = std::slice::from_raw_parts(list, operations);
        let write = sys::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_WRITE;
        let all = sys::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_ALL;
        Some(list.contains(&write) || list.contains(&all))
    }
}

fn described(event: &Event) -> Result<TopicIds, TopicIdError> {
    // SAFETY: the event is alive, and everything read here belongs to it.
    unsafe {
        let error = sys::rd_kafka_event_error(event.0);
        if error != RD_KAFKA_RESP_ERR_NO_ERROR {
            let words = text(sys::rd_kafka_event_error_string(event.0));
            return Err(match RDKafkaErrorCode::from(error) {
                // The broker's version lacks the call.
                RDKafkaErrorCode::UnsupportedFeature => TopicIdError::NoId(words),
                _ => TopicIdError::NoAnswer(words),
            });
        }
        let result = sys::rd_kafka_event_DescribeTopics_result(event.0);
        if result.is_null() {
            return Err(TopicIdError::NoAnswer("an empty answer".into()));
        }
        let mut count = 0;
        let topics = sys::rd_kafka_DescribeTopics_result_topics(result, &mut count);
        let mut ids = HashMap::new();
        for index in 0..count {
            let topic = *topics.add(index);
            let name = text(sys::rd_kafka_TopicDescription_name(topic));
            ids.insert(name, topic_id(topic));
        }
        Ok(ids)
    }
}

/// # Safety
/// `topic` is alive.
unsafe fn topic_id(topic: *const sys::rd_kafka_TopicDescription_t) -> Result<String, TopicIdError> {
    // SAFETY: the caller's.
    unsafe {
        let error = sys::rd_kafka_TopicDescription_error(topic);
        if !error.is_null() {
            let code = sys::rd_kafka_error_code(error);
            if code != RD_KAFKA_RESP_ERR_NO_ERROR {
                let words = text(sys::rd_kafka_error_string(error));
                return Err(match RDKafkaErrorCode::from(code) {
                    RDKafkaErrorCode::TopicAuthorizationFailed => TopicIdError::Forbidden(words),
                    RDKafkaErrorCode::UnknownTopicOrPartition => TopicIdError::NotThere(words),
                    _ => TopicIdError::NoAnswer(words),
                });
            }
        }
        let id = sys::rd_kafka_TopicDescription_topic_id(topic);
        let zero = id.is_null()
            || (sys::rd_kafka_Uuid_most_significant_bits(id) == 0
                && sys::rd_kafka_Uuid_least_significant_bits(id) == 0);
        if zero {
            return Err(TopicIdError::NoId("the broker gives topics no id".into()));
        }
        // As Kafka's own tools print it.
        let id = text(sys::rd_kafka_Uuid_base64str(id));
        Ok(id.trim_end_matches('=').replace('+', "-").replace('/', "_"))
    }
}

/// An event of a queue, destroyed when dropped.
struct Event(*mut sys::rd_kafka_event_t);

impl Event {
    /// The next event, if one comes within `timeout`.
    ///
    /// # Safety
    /// `queue` is alive.
    unsafe fn poll(queue: *mut sys::rd_kafka_queue_t, timeout: Duration) -> Option<Self> {
        // SAFETY: the caller's.
        let event = unsafe { sys::rd_kafka_queue_poll(queue, milliseconds(timeout)) };
        (!event.is_null()).then_some(Self(event))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: returned by `rd_kafka_queue_poll`, destroyed once.
        unsafe { sys::rd_kafka_event_destroy(self.0) }
    }
}

fn milliseconds(duration: Duration) -> c_int {
    c_int::try_from(duration.as_millis()).unwrap_or(c_int::MAX)
}

/// # Safety
/// `list` is null or alive for as long as the slice is used.
unsafe fn elements<'a>(
    list: *mut sys::rd_kafka_topic_partition_list_t,
) -> &'a [sys::rd_kafka_topic_partition_t] {
    // SAFETY: the caller's; a list has `cnt` elements.
    unsafe {
        match list.as_ref() {
            Some(list) if list.cnt > 0 && !list.elems.is_null() => {
                std::slice::from_raw_parts(list.elems, list.cnt as usize)
            }
            _ => &[],
        }
    }
}

/// # Safety
/// `start` is null or has `size` bytes that live as long as the slice is used.
unsafe fn bytes_of<'a>(start: *const c_void, size: usize) -> Option<&'a [u8]> {
    // SAFETY: the caller's.
    (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start.cast(), size) })
}

/// # Safety
/// `start` is null or a string that ends with NUL.
unsafe fn text(start: *const c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(start) }.to_string_lossy().into_owned()
}
