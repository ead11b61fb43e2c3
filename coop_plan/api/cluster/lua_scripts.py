"""Atomic changes of a job in Redis, as Lua scripts. Times are Redis's own, in ms.

A job is a hash `job:{id}`. Beside it are its request (`:body`), its answer (`:record`) and its
subscribed servers (`:waiting`, with the time at which each subscription ends). The sorted sets
`queued` and `running` have the ids of unfinished jobs. A running job has a lease with a fencing
token, which grows with each lease: calls with an older token change nothing.
"""

from typing import Final

COMMON: Final = """
local P, id = ARGV[1], ARGV[2]
local job = P .. 'job:' .. id
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function get(name) return redis.call('HGET', job, name) or '' end
local state = get('state')
local active = state == 'queued' or state == 'running'

local function update(...)
    redis.call('HSET', job, ...)
    redis.call('HINCRBY', job, 'version', 1)
    redis.call('PUBLISH', P .. 'news', id)
end

local function finish(how, problem)
    redis.call('ZREM', P .. 'queued', id)
    redis.call('ZREM', P .. 'running', id)
    redis.call('DEL', job .. ':body', job .. ':waiting')
    redis.call('PEXPIRE', job, FINISHED)
    update('state', how, 'problem', problem, 'ended', now, 'message', '')
end

local function queue()
    redis.call('ZREM', P .. 'running', id)
    redis.call('ZADD', P .. 'queued', get('began'), id)
    update('state', 'queued', 'published', now, 'publishes', 1)
end

local function watched()
    if get('wanted') == '1' then return true end
    redis.call('ZREMRANGEBYSCORE', job .. ':waiting', '-inf', now)
    return redis.call('ZCARD', job .. ':waiting') > 0
end

local function subscribe(server)
    redis.call('ZADD', job .. ':waiting', now + SUBSCRIPTION, server)
end
"""

SUBMIT: Final = """
local function queued_by(caller)
    local count = 0
    for _, other in ipairs(redis.call('ZRANGE', P .. 'queued', 0, -1)) do
        if redis.call('HGET', P .. 'job:' .. other, 'caller') == caller then count = count + 1 end
    end
    return count
end
local server, body, max_queued = ARGV[3], ARGV[4], tonumber(ARGV[5])
if not active then
    local left = max_queued - redis.call('ZCARD', P .. 'queued')
    local mine = queued_by(ARGV[7])
    if left <= 0 then return 'full' end
    if ARGV[7] ~= '' and mine >= math.floor((left + mine + 1) / 2) then return 'full' end
    if ARGV[6] == '' then return 'absent' end
    redis.call('DEL', job .. ':record', job .. ':waiting')
    redis.call('SET', job .. ':body', body)
    redis.call('HSET', job, 'began', now, 'work', ARGV[6], 'caller', ARGV[7], 'wanted', 0,
        'deliveries', 0, 'problem', '', 'ended', '', 'message', '', 'figures', '')
    redis.call('PERSIST', job)
    queue()
    subscribe(server)
    return 'new'
end
subscribe(server)
return 'joined'
"""
"""ARGV: server, body or empty, limit on queued jobs, `JobRequest` or empty, caller.

A caller has at most half of the places that others leave."""

VIEW: Final = """
local resend = 0
if active and ARGV[3] ~= '' then subscribe(ARGV[3]) end
if state == 'running' and tonumber(get('lease')) < now then
    queue()
    resend = 1
elseif state == 'queued' then
    local pause = RESEND * 2 ^ math.min(tonumber(get('publishes')) - 1, 6)
    if tonumber(get('published')) + pause < now then
        redis.call('HSET', job, 'published', now)
        redis.call('HINCRBY', job, 'publishes', 1)
        resend = 1
    end
end
return {get('work'), get('state'), get('version'), get('message'), get('figures'), get('problem'),
    tostring(now - (tonumber(get('began')) or now)), resend,
    tostring((tonumber(get('ended')) or now) - (tonumber(get('began')) or now))}
"""
"""ARGV: server whose subscription is renewed, or empty."""

LEASE: Final = """
-- A job whose lease has ended may be leased; else the next one by fairness is: of the caller with
-- the fewest running jobs, then of the one that was served longest ago, then the oldest.
if not (state == 'running' and tonumber(get('lease')) < now) then
    local function caller_of(other)
        return redis.call('HGET', P .. 'job:' .. other, 'caller') or ''
    end
    local running = {}
    for _, other in ipairs(redis.call('ZRANGE', P .. 'running', 0, -1)) do
        local caller = caller_of(other)
        running[caller] = (running[caller] or 0) + 1
    end
    local best, fewest, longest
    for _, other in ipairs(redis.call('ZRANGE', P .. 'queued', 0, -1)) do
        local caller = caller_of(other)
        local has = running[caller] or 0
        local served = tonumber(redis.call('HGET', P .. 'served', caller) or 0)
        if not best or has < fewest or (has == fewest and served < longest) then
            best, fewest, longest = other, has, served
        end
    end
    if not best then return {} end
    id = best
    job = P .. 'job:' .. id
    state = get('state')
end
if not watched() then finish('cancelled', 'unwatched') return {} end
if redis.call('HINCRBY', job, 'deliveries', 1) > DELIVERIES then
    finish('failed', 'crashed')
    return {}
end
local token = redis.call('HINCRBY', job, 'token', 1)
redis.call('HSET', P .. 'served', get('caller'), redis.call('INCR', P .. 'leases'))
redis.call('ZREM', P .. 'queued', id)
redis.call('ZADD', P .. 'running', now, id)
update('state', 'running', 'lease', now + LEASE)
return {id, token, get('work'), redis.call('GET', job .. ':body')}
"""

RENEW: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
if not watched() then finish('cancelled', 'unwatched') return 0 end
redis.call('HSET', job, 'lease', now + LEASE)
if ARGV[4] ~= get('message') or ARGV[5] ~= get('figures') then
    update('message', ARGV[4], 'figures', ARGV[5])
end
return 1
"""
"""ARGV: token, message, figures."""

FINISH: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
if ARGV[5] ~= '' then redis.call('SET', job .. ':record', ARGV[5], 'PX', RECORD) end
finish(ARGV[4] == '' and 'done' or 'failed', ARGV[4])
return 1
"""
"""ARGV: token, problem or empty, answer or empty."""

RELEASE: Final = """
if state ~= 'running' or get('token') ~= ARGV[3] then return 0 end
redis.call('HINCRBY', job, 'deliveries', ARGV[4])
redis.call('HSET', job, 'lease', 0)
queue()
return 1
"""
"""ARGV: token, number to add to the deliveries."""

CANCEL: Final = """
if active then finish('cancelled', 'cancelled') return 1 end
return 0
"""

UNSUBSCRIBE: Final = """
redis.call('ZREM', job .. ':waiting', ARGV[3])
if active and not watched() then finish('cancelled', 'unwatched') end
return 1
"""
"""ARGV: server."""

DETACH: Final = """
if active then redis.call('HSET', job, 'wanted', 1) end
return state
"""
