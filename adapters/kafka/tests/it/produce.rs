//! Producing what rdkafka's own types cannot express: header names that are no text.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use rdkafka::ClientContext;
use rdkafka::Message;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext};
use rdkafka::producer::{BaseProducer, DeliveryResult, Producer as _, ProducerContext};
use rdkafka_sys as sys;
use sys::rd_kafka_vtype_t as vtype;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A record to produce.
#[derive(Debug, Clone, Default)]
pub struct Out {
    pub partition: i32,
    pub key: Option<Bytes>,
    pub headers: Vec<(Bytes, Option<Bytes>)>,
    pub body: Option<Bytes>,
}

impl Out {
    /// A record whose id and body are `id`.
    pub fn new(partition: i32, id: &str) -> Self {
        let id = Bytes::copy_from_slice(id.as_bytes());
        let headers = vec![(Bytes::from_static(b"message-id"), Some(id.clone()))];
        Self { partition, key: None, headers, body: Some(id) }
    }
}

/// The first failed delivery.
#[derive(Default, Clone)]
struct Reports(Arc<Mutex<Option<String>>>);

impl ClientContext for Reports {}

impl ProducerContext for Reports {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        if let Err((error, message)) = result {
            let text = format!("{}/{}: {error}", message.topic(), message.partition());
            self.0.lock().expect("no panic").get_or_insert(text);
        }
    }
}

/// A producer that waits for confirmation.
#[derive(Clone)]
pub struct Producer {
    producer: Arc<BaseProducer<Reports>>,
    reports: Reports,
}

impl Producer {
    /// With further properties.
    pub fn new(brokers: &str, properties: &[(&str, &str)]) -> Self {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", brokers).set("linger.ms", "0");
        config.set("max.in.flight.requests.per.connection", "1");
        let properties: BTreeMap<_, _> = properties.iter().copied().collect();
        for (key, value) in properties {
            config.set(key, value);
        }
        let reports = Reports::default();
        let producer = BaseProducer::from_config_and_context(&config, reports.clone())
            .expect("a producer can be made");
        Self { producer: Arc::new(producer), reports }
    }

    /// For transactions.
    pub fn inner(&self) -> &BaseProducer<impl ProducerContext> {
        &self.producer
    }

    /// Produces in order and waits until all are confirmed.
    pub async fn produce(&self, topic: &str, records: &[Out]) {
        let (this, topic, records) = (self.clone(), topic.to_owned(), records.to_vec());
        let done = tokio::task::spawn_blocking(move || {
            records.iter().for_each(|record| this.send(&topic, record));
            this.producer.flush(TIMEOUT).expect("records are confirmed in time");
        });
        done.await.expect("no panic");
        let failed = self.reports.0.lock().expect("no panic").take();
        assert_eq!(failed, None, "a record was not taken by the broker");
    }

    fn send(&self, topic: &str, record: &Out) {
        let topic = CString::new(topic).expect("a topic's name");
        // SAFETY: everything that is pointed to outlives the call, which copies it
        // (RD_KAFKA_MSG_F_COPY); the headers become the message's own on success.
        unsafe {
            let headers = sys::rd_kafka_headers_new(record.headers.len());
            for (name, value) in &record.headers {
                let (start, size) = memory(value.as_ref());
                sys::rd_kafka_header_add(
                    headers,
                    name.as_ptr().cast(),
                    name.len() as isize,
                    start,
                    if value.is_some() { size as isize } else { 0 },
                );
            }
            let mut units =
                [sys::rd_kafka_vu_t { vtype: vtype::RD_KAFKA_VTYPE_END, u: std::mem::zeroed() }; 6];
            units[0].vtype = vtype::RD_KAFKA_VTYPE_TOPIC;
            units[0].u.cstr = topic.as_ptr();
            units[1].vtype = vtype::RD_KAFKA_VTYPE_PARTITION;
            units[1].u.i32_ = record.partition;
            units[2].vtype = vtype::RD_KAFKA_VTYPE_VALUE;
            units[2].u.mem = unit(record.body.as_ref());
            units[3].vtype = vtype::RD_KAFKA_VTYPE_KEY;
            units[3].u.mem = unit(record.key.as_ref());
            units[4].vtype = vtype::RD_KAFKA_VTYPE_MSGFLAGS;
            units[4].u.i = sys::RD_KAFKA_MSG_F_COPY as c_int;
            units[5].vtype = vtype::RD_KAFKA_VTYPE_HEADERS;
            units[5].u.headers = headers;
            let client = self.producer.client().native_ptr();
            let error = sys::rd_kafka_produceva(client, units.as_ptr(), units.len());
            assert!(error.is_null(), "librdkafka takes the record");
        }
    }
}

fn memory(bytes: Option<&Bytes>) -> (*const c_void, usize) {
    bytes.map_or((ptr::null(), 0), |bytes| (bytes.as_ptr().cast(), bytes.len()))
}

fn unit(bytes: Option<&Bytes>) -> sys::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 {
    let (start, size) = memory(bytes);
    sys::rd_kafka_vu_s__bindgen_ty_1__bindgen_ty_1 { ptr: start.cast_mut(), size }
}
