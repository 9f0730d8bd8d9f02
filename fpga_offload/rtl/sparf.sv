// The kernel `sparf`: SparQ's attention over pages. Channels by the query, approximate logits of the context
// from its channel pages, the tokens with the largest sums of them, and attention to those and the window,
// behind the row filter. Ports as of `attend`, and one for channel pages.
//
// The window's logits come from the attention core, whose queries are masked to the chosen channels for
// them; queries are read again for the attention.
`default_nettype none
module sparf #(parameter D = 128, parameter G = 1) (
    input  wire         clk,
    input  wire         rst,
    input  wire         s_awvalid, output wire s_awready, input wire [11:0] s_awaddr,
    input  wire         s_wvalid, output wire s_wready, input wire [31:0] s_wdata, input wire [3:0] s_wstrb,
    output wire         s_bvalid, input wire s_bready,
    input  wire         s_arvalid, output wire s_arready, input wire [11:0] s_araddr,
    output wire         s_rvalid, input wire s_rready, output wire [31:0] s_rdata,
    output wire         interrupt,
    output wire         list_arvalid, input wire list_arready, output wire [63:0] list_araddr,
    output wire [7:0]   list_arlen, input wire list_rvalid, output wire list_rready, input wire [511:0] list_rdata,
    input wire [1:0]    list_rresp,
    output wire         page_arvalid, input wire page_arready, output wire [63:0] page_araddr,
    output wire [7:0]   page_arlen, input wire page_rvalid, output wire page_rready, input wire [511:0] page_rdata,
    input wire [1:0]    page_rresp,
    output wire         channel_arvalid, input wire channel_arready, output wire [63:0] channel_araddr,
    output wire [7:0]   channel_arlen, input wire channel_rvalid, output wire channel_rready,
    input  wire [255:0] channel_rdata,
    input wire [1:0]    channel_rresp,
    output wire         out_awvalid, input wire out_awready, output wire [63:0] out_awaddr, output wire [7:0] out_awlen,
    output wire         out_wvalid, input wire out_wready, output wire [511:0] out_wdata,
    output wire [63:0]  out_wstrb, output wire out_wlast, input wire out_bvalid, output wire out_bready,
    input wire [1:0]    out_bresp
);
    localparam NB = D / 32;
    localparam QUERY_BEATS = G * NB;
    localparam PARTIAL_BEATS = 2 * QUERY_BEATS + 1;
    localparam WORDS = 64;
    localparam LN = 16;
    localparam LP = LN - 4;                    // of pages

    wire [32*WORDS-1:0] words;
    wire go;
    reg done;
    control_registers #(.WORDS(WORDS)) control(.clk(clk), .rst(rst), .awvalid(s_awvalid), .awready(s_awready),
        .awaddr(s_awaddr), .wvalid(s_wvalid), .wready(s_wready), .wdata(s_wdata), .wstrb(s_wstrb), .bvalid(s_bvalid),
        .bready(s_bready), .arvalid(s_arvalid), .arready(s_arready), .araddr(s_araddr), .rvalid(s_rvalid),
        .rready(s_rready), .rdata(s_rdata), .words(words), .start(go), .done(done), .interrupt(interrupt));
    wire [63:0] q = words[8*ssdkv_fpga::REG_SPARF_Q +: 64];
    wire [63:0] pages = words[8*ssdkv_fpga::REG_SPARF_PAGES +: 64];
    wire [63:0] channel_pages = words[8*ssdkv_fpga::REG_SPARF_CHANNEL_PAGES +: 64];
    wire [63:0] entries = words[8*ssdkv_fpga::REG_SPARF_ENTRIES +: 64];
    wire [63:0] jobs = words[8*ssdkv_fpga::REG_SPARF_JOBS +: 64];
    wire [63:0] channels = words[8*ssdkv_fpga::REG_SPARF_CHANNELS +: 64];
    wire [63:0] mean_value = words[8*ssdkv_fpga::REG_SPARF_MEAN_VALUE +: 64];
    wire [63:0] out = words[8*ssdkv_fpga::REG_SPARF_OUT +: 64];
    wire [63:0] masks = words[8*ssdkv_fpga::REG_SPARF_MASKS +: 64];
    wire [63:0] choices = words[8*ssdkv_fpga::REG_SPARF_CHOICES +: 64];
    wire [63:0] status = words[8*ssdkv_fpga::REG_SPARF_STATUS +: 64];
    wire [31:0] job_count = words[8*ssdkv_fpga::REG_SPARF_JOB_COUNT +: 32];
    wire [31:0] entry_count = words[8*ssdkv_fpga::REG_SPARF_ENTRY_COUNT +: 32];
    wire [31:0] channel_count = words[8*ssdkv_fpga::REG_SPARF_CHANNEL_COUNT +: 32];
    wire [31:0] block_tokens = words[8*ssdkv_fpga::REG_SPARF_BLOCK_TOKENS +: 32];
    wire [31:0] page_tokens = words[8*ssdkv_fpga::REG_SPARF_PAGE_TOKENS +: 32];
    wire [31:0] keep_channels = words[8*ssdkv_fpga::REG_SPARF_KEEP_CHANNELS +: 32];
    wire [31:0] channel_group = words[8*ssdkv_fpga::REG_SPARF_CHANNEL_GROUP +: 32];
    wire [31:0] sinks = words[8*ssdkv_fpga::REG_SPARF_SINKS +: 32];
    wire [31:0] v_offset = words[8*ssdkv_fpga::REG_SPARF_V_OFFSET +: 32];
    wire [31:0] scale = words[8*ssdkv_fpga::REG_SPARF_SCALE +: 32];
    wire [31:0] scale_log2e = words[8*ssdkv_fpga::REG_SPARF_SCALE_LOG2E +: 32];
    wire [31:0] flags = words[8*ssdkv_fpga::REG_SPARF_FLAGS +: 32];
    wire bf16 = (flags & ssdkv_fpga::FLAG_BFLOAT16) != 0;
    wire attends = (flags & ssdkv_fpga::FLAG_ATTEND) != 0;
    wire with_window = (flags & ssdkv_fpga::FLAG_WINDOW) != 0;

    wire by_page = (flags & ssdkv_fpga::FLAG_BY_PAGE) != 0;
    wire with_mean = (flags & ssdkv_fpga::FLAG_MEAN_VALUE) != 0;

    // Arguments, by their places in the call. Groups of channels are powers of two, as d is.
    reg [3:0] together;                        // log2 of channel_group
    reg [31:0] wrong;
    integer i;
    always @* begin
        together = 0;
        for (i = 1; i <= $clog2(D); i = i + 1) if (channel_group == 1 << i) together = i;
        wrong = 0;
        if ((with_window && !attends) || (with_mean && !with_window)) wrong = 22;
        if (v_offset < 32 * D || v_offset[5:0] != 0) wrong = 19;
        if (keep_channels == 0 || keep_channels > D || (keep_channels & (channel_group - 1)) != 0) wrong = 16;
        if (channel_group != 1 << together) wrong = 17;
        if (by_page && (page_tokens == 0 || page_tokens[3:0] != 0)) wrong = 15;
        if (block_tokens == 0 || block_tokens[3:0] != 0 || block_tokens > ssdkv_fpga::MAX_SPARF_TOKENS) wrong = 14;
        if (job_count > ssdkv_fpga::MAX_JOBS) wrong = 11;
    end
    reg [31:0] block_rest;                     // of block_tokens, less whole pages

    localparam [5:0] IDLE = 0, CHECK = 1, DIVIDE = 2, JOB = 3, JOB_BEAT = 4, JOB_CHECK = 5, QUERY = 6, CHOOSE = 7,
        SCORE = 8, WINDOW_QUERY = 9, WINDOW_KEYS = 10, WINDOW_SCORE = 11, SUM = 12, PAGES_MASS = 13, SELECT = 14,
        EXPAND = 15, WEIGH = 16, MASKS = 17, MASKS_SENT = 18, SAY = 19, SAID = 20, QUERY_AGAIN = 21, MEAN = 22,
        ENTRIES = 23, WINDOW = 24, RUN = 25, OUT = 26, NEXT = 27, STOP = 28, STATUS = 29, STATUS_WAIT = 30;
    reg [5:0] state;
    reg [31:0] code, place, job;
    reg [63:0] cycles;
    reg [511:0] job_beat;
    wire [255:0] now = job_beat[256*job[0] +: 256];
    wire [31:0] job_query = now[31:0], job_out = now[63:32], first_channels = now[95:64], blocks = now[127:96],
        first_entry = now[159:128], first_window = now[191:160], window_entries = now[223:192], keep = now[255:224];
    // Blocks have at least 16 tokens, so more of them than pages cannot be.
    wire blocks_many = blocks > ssdkv_fpga::MAX_SPARF_TOKENS / 16;
    wire [31:0] context_tokens = blocks[12:0] * block_tokens[16:0];
    wire [31:0] context_pages = context_tokens >> 4;
    wire outside = {1'b0, first_entry} + context_pages > entry_count
        || {1'b0, first_window} + window_entries > entry_count || {1'b0, first_channels} + blocks > channel_count;
    wire too_long = {1'b0, context_pages} + window_entries > ssdkv_fpga::MAX_SPARF_TOKENS / 16;

    function automatic [63:0] times(input [31:0] x, input integer factor);
        integer bit_;
        begin
            times = 0;
            for (bit_ = 0; bit_ < 24; bit_ = bit_ + 1)
                if (factor[bit_]) times = times + ({32'd0, x} << bit_);
        end
    endfunction

    // What is read by the lists' port, and written: places of arguments.
    reg [31:0] reading, written;
    wire failed;
    wire [31:0] failed_place;
    memory_errors #(.PORTS(4)) errors(.clk(clk), .rst(rst), .start(go), .answered({out_bvalid && out_bready,
        channel_rvalid && channel_rready, page_rvalid && page_rready, list_rvalid && list_rready}),
        .response({out_bresp, channel_rresp, page_rresp, list_rresp}), .argument({written, 32'd2, 32'd1, reading}),
        .failed(failed), .place(failed_place));

    // Lists and queries.
    localparam [1:0] NONE = 0, CHANNELS = 1, PAGES = 2;
    reg list_start;
    reg [1:0] listed;                          // what comes
    reg [57:0] list_address;
    reg [15:0] list_beats;
    wire list_idle, list_valid, room;
    wire [511:0] list_data;
    list_reader lists(.clk(clk), .rst(rst), .start(list_start), .address(list_address), .beats(list_beats),
        .room(listed == NONE || room), .idle(list_idle), .out_valid(list_valid), .out_data(list_data),
        .arvalid(list_arvalid), .arready(list_arready), .araddr(list_araddr), .arlen(list_arlen),
        .rvalid(list_rvalid), .rready(list_rready), .rdata(list_rdata));
    reg [511:0] waiting [0:31];
    reg [5:0] put, got;
    wire [5:0] beats_waiting = put - got;
    reg [31:0] items_left;
    reg [2:0] lane;                            // of the item in front: of 8 channels, or 4 entries
    reg [LP:0] item;                           // its place
    wire item_valid = listed != NONE && beats_waiting != 0 && items_left != 0;
    wire item_taken;
    wire lane_last = listed == CHANNELS ? lane == 7 : lane == 3;
    wire [511:0] item_beat = waiting[got[4:0]];
    assign room = beats_waiting <= 16;
    always @(posedge clk) begin
        if (rst || list_start) begin
            put <= 0;
            got <= 0;
        end else begin
            if (listed != NONE && list_valid) put <= put + 6'd1;
            if (item_taken) got <= got + (lane_last || items_left == 1);
        end
        if (listed != NONE && list_valid) waiting[put[4:0]] <= list_data;
    end

    // Steps 1 to 4.
    wire job_start = state == QUERY && list_start;
    wire core_start = (state == WINDOW_QUERY || state == QUERY_AGAIN) && list_start;
    wire choice_done, score_ready, logit_valid, key_valid, scores_done, scores_quiet, select_ready, take_valid, take,
        select_done;
    wire [7:0] ask_place, ask_channel, sum_place;
    wire [32*G-1:0] reduced, logit, factors;
    wire [D-1:0] channel_mask;
    wire [31:0] key;
    reg [63:0] channel_beats;     // of 32 bytes, since reset: the parts are reset after each job
    always @(posedge clk) channel_beats <= rst ? 64'd0 : channel_beats + {63'd0, channel_rvalid && channel_rready};
    wire [63:0] block_address = item_beat[64*lane +: 64] + channel_pages;
    wire block_bad = listed == CHANNELS && item_valid && (block_address == 0 || block_address[4:0] != 0);
    reg broken_channels, core_reset, parts_reset, scores_start, load_end;
    channel_choice #(.D(D), .G(G)) choice(.clk(clk), .rst(rst || parts_reset), .start(job_start), .bf16(bf16),
        .scale(scale), .keep(keep_channels[8:0]), .together(together), .q_valid(state == QUERY && list_valid),
        .q_data(list_data), .done(choice_done), .chosen_mask(channel_mask), .factors(factors),
        .channel_place(ask_place), .channel(ask_channel), .place(sum_place), .reduced(reduced));
    channel_scores #(.D(D), .G(G)) scores(.clk(clk), .rst(rst || parts_reset), .start(scores_start), .bf16(bf16),
        .keep(keep_channels[8:0]), .block_tokens(block_tokens), .sinks(sinks),
        .block_valid(listed == CHANNELS && item_valid && !block_bad && !broken_channels), .block_ready(score_ready),
        .block_address(block_address), .blocks_end(items_left == 0 || broken_channels), .ask_place(ask_place),
        .ask_channel(ask_channel), .sum_place(sum_place), .reduced(reduced), .logit_valid(logit_valid), .logit(logit),
        .key_valid(key_valid), .key(key), .done(scores_done), .quiet(scores_quiet),
        .arvalid(channel_arvalid), .arready(channel_arready), .araddr(channel_araddr), .arlen(channel_arlen),
        .rvalid(channel_rvalid), .rready(channel_rready), .rdata(channel_rdata));

    wire window_scoring = state == WINDOW_SCORE;
    wire core_scored, summed, page_key_valid, paged, weighed;
    wire [32*G-1:0] core_scores, alpha, rest, lse;
    wire [31:0] page_key, window_mass;
    reg sum_start, pages_start, window_start;
    wire token_valid, token_taken;
    token_mass #(.G(G), .LN(LN)) mass(.clk(clk), .rst(rst || parts_reset), .start(job_start),
        .logit_valid(window_scoring ? core_scored : logit_valid), .logit(window_scoring ? core_scores : logit),
        .sum(sum_start), .summed(summed), .pages(pages_start), .page_tokens(page_tokens),
        .context_tokens(context_tokens[LN:0]), .sinks(sinks), .key_valid(page_key_valid), .key(page_key), .paged(paged),
        .weigh_valid(token_valid), .weigh_take(token_taken), .weigh_window(window_start), .done(weighed), .lse(lse),
        .alpha(alpha), .rest(rest), .window_mass(window_mass));
    argtopk #(.LN(LN)) select(.clk(clk), .rst(rst || parts_reset), .start(job_start), .ready(select_ready),
        .key_valid(by_page ? page_key_valid : key_valid), .key(by_page ? page_key : key), .load_end(load_end),
        .keep(keep >> LN != 0 ? {1'b1, {LN{1'b0}}} : keep[LN:0]), .emit(state == SELECT), .out_valid(take_valid),
        .out_take(take), .done(select_done));

    // Pages that are taken, as tokens.
    reg page_taken [0:(1<<LP)-1];
    reg [LP:0] page_at;
    reg [LN:0] expand_at;
    reg [31:0] in_page;
    reg expanded, expanded_take;
    wire expand = state == EXPAND && {{(31-LN){1'b0}}, expand_at} != context_tokens;
    always @(posedge clk) begin
        if (take_valid) page_taken[page_at[LP-1:0]] <= take;
        expanded <= expand;
        expanded_take <= page_taken[page_at[LP-1:0]];
        if (job_start || select_done) page_at <= 0;
        else if (take_valid && by_page) page_at <= page_at + 1'b1;
        else if (expand && in_page + 1 == page_tokens) page_at <= page_at + 1'b1;
        if (state != EXPAND) begin
            expand_at <= 0;
            in_page <= 0;
        end else if (expand) begin
            expand_at <= expand_at + 1'b1;
            in_page <= in_page + 1 == page_tokens ? 0 : in_page + 1;
        end
    end
    assign token_valid = by_page ? expanded : take_valid;
    assign token_taken = by_page ? expanded_take : take;

    // What is taken, by entry.
    reg [15:0] chosen [0:(1<<LP)-1];
    reg [15:0] taking;
    reg [LN-1:0] token;
    reg [31:0] tokens_chosen, pages_chosen;
    wire [15:0] taken = {token_taken, taking[15:1]};
    reg [LP-1:0] mask_at;
    reg [15:0] mask_read;
    always @(posedge clk) begin
        if (job_start) begin
            token <= 0;
            tokens_chosen <= 0;
            pages_chosen <= 0;
        end else if (token_valid) begin
            token <= token + 1'b1;
            taking <= taken;
            tokens_chosen <= tokens_chosen + token_taken;
            if (token[3:0] == 15 && taken != 0) pages_chosen <= pages_chosen + 1;
        end
        if (token_valid && token[3:0] == 15) chosen[token[LN-1:4]] <= taken;
        mask_read <= chosen[mask_at];
    end

    // Masks go out 16 a beat, from any place in it on.
    wire [63:0] masks_address = masks + {30'd0, first_entry, 2'd0};
    wire [3:0] masks_offset = masks_address[5:2];
    reg [511:0] mask_beat;
    reg [63:0] mask_strobe;
    reg [3:0] mask_lane;
    reg [LP:0] mask_put;
    reg mask_full, mask_coming;
    wire write_ready;
    wire mask_sent = state == MASKS_SENT && mask_full && write_ready;

    // Entries of the context with their masks, then those of the window. Pages of the context are whole.
    wire [127:0] plain = item_beat[128*lane[1:0] +: 128];
    reg window_now, entries_started;
    wire [31:0] plain_tokens = window_now || plain[95:64] == 16 ? plain[95:64] : 32'd17;
    wire [127:0] entry = {window_now ? 32'h0000ffff : {16'd0, chosen[item[LP-1:0]]}, plain_tokens, plain[63:0]};
    wire entry_ready;
    assign item_taken = listed == CHANNELS ? score_ready || (item_valid && (block_bad || broken_channels))
                                           : item_valid && entry_ready;

    wire broken, quiet, row_valid, row_is_value, row_last, row_beat, finish;
    wire [31:0] broken_code, broken_place;
    wire [511:0] row_data, core_data;
    wire [63:0] beats;
    reg [63:0] beats_before;
    wire [63:0] all_beats = beats + (channel_beats >> 1);   // of 64 bytes
    wire core_idle, core_valid, core_ready, core_last;
    wire [32*G-1:0] core_l;
    reg last_list;                             // no entry comes behind those of the list
    page_reader #(.D(D)) reader(.clk(clk), .rst(rst), .start(core_start), .pages(pages), .v_offset(v_offset),
        .use_mask(1'b1), .keys_only(window_scoring || state == WINDOW_KEYS), .whole(1'b0), .stop(failed), .hold(1'b0),
        .entry_valid(listed == PAGES && item_valid), .entry_ready(entry_ready), .entry(entry),
        .entries_end(entries_started && last_list && items_left == 0), .broken(broken), .broken_code(broken_code),
        .broken_place(broken_place), .quiet(quiet), .row_valid(row_valid), .row_is_value(row_is_value),
        .row_last(row_last), .row_beat(row_beat), .row_data(row_data), .finish(finish), .beats(beats),
        .arvalid(page_arvalid), .arready(page_arready), .araddr(page_araddr), .arlen(page_arlen),
        .rvalid(page_rvalid), .rready(page_rready), .rdata(page_rdata));
    // Queries, for the window those of the chosen channels.
    reg [$clog2(NB)-1:0] query_beat;
    reg [511:0] query_data;
    integer e;
    always @(posedge clk) query_beat <= core_start ? 0 : query_beat + list_valid;
    always @* for (e = 0; e < 32; e = e + 1)
        query_data[16*e +: 16] = state != WINDOW_QUERY || channel_mask[{query_beat, e[4:0]}] ? list_data[16*e +: 16] : 16'd0;
    attention_core #(.D(D), .G(G)) core(.clk(clk), .rst(rst || core_reset), .start(core_start), .bf16(bf16),
        .score_scale(window_scoring ? factors : {G{scale_log2e}}),
        .q_valid((state == WINDOW_QUERY || state == QUERY_AGAIN) && list_valid), .q_data(query_data),
        .row_valid(row_valid), .row_is_value(row_is_value), .row_last(row_last), .row_beat(row_beat),
        .row_data(row_data), .finish(finish && entries_started && state != WINDOW_SCORE && state != WINDOW_KEYS),
        .idle(core_idle), .score_valid(core_scored), .scores(core_scores), .l(core_l), .out_valid(core_valid),
        .out_ready(core_ready), .out_last(core_last), .out_data(core_data));
    reg [6:0] scoring;                         // cycles until the last score is there, behind the last row
    wire out_valid, out_ready, out_last;
    wire [511:0] out_data;
    mean_mix #(.D(D), .G(G)) mix(.clk(clk), .rst(rst), .start(core_start), .enable(with_mean),
        .mean_valid(state == MEAN && list_valid), .mean_data(list_data), .alpha(alpha), .rest(rest), .total(core_l),
        .in_valid(core_valid), .in_ready(core_ready), .in_last(core_last), .in_data(core_data),
        .out_valid(out_valid), .out_ready(out_ready), .out_last(out_last), .out_data(out_data));

    reg write_start, write_status, write_choice, choice_half;
    reg [63:0] write_address;
    reg [15:0] write_beats;
    wire writer_idle;
    wire [511:0] status_beat = {256'd0, all_beats - beats_before, cycles, job, 32'(ssdkv_fpga::VERSION), place, code};
    wire [255:0] said_lse = {{(256-32*G){1'b0}}, lse}, said_alpha = {{(256-32*G){1'b0}}, alpha};
    wire [511:0] said = choice_half ? {416'd0, pages_chosen, tokens_chosen, window_mass} : {said_lse, said_alpha};
    wire sends_masks = state == MASKS_SENT;
    assign out_ready = write_ready && state == OUT;
    record_writer writer(.clk(clk), .rst(rst), .start(write_start), .address(write_address), .beats(write_beats),
        .idle(writer_idle), .in_valid(write_status || write_choice || (sends_masks ? mask_full : state == OUT && out_valid)),
        .in_ready(write_ready),
        .in_data(write_status ? status_beat : write_choice ? said : sends_masks ? mask_beat : out_data),
        .in_strobe(sends_masks ? mask_strobe : {64{1'b1}}), .awvalid(out_awvalid), .awready(out_awready),
        .awaddr(out_awaddr), .awlen(out_awlen), .wvalid(out_wvalid), .wready(out_wready), .wdata(out_wdata),
        .wstrb(out_wstrb), .wlast(out_wlast), .bvalid(out_bvalid), .bready(out_bready));

    wire [57:0] q_address = q[63:6] + times(job_query, QUERY_BEATS);
    wire [63:0] channels_from = channels + {29'd0, first_channels, 3'd0};
    wire [63:0] channels_to = channels_from + {29'd0, blocks, 3'd0} + 63;
    reg [31:0] list_first, list_count;         // entries of the context, or of the window
    wire [31:0] list_end = list_first + list_count;
    wire [31:0] list_first_beat = {2'd0, list_first[31:2]}, list_end_beat = {2'd0, list_end[31:2]} + (list_end[1:0] != 0);
    always @(posedge clk) begin
        done <= 0;
        list_start <= 0;
        write_start <= 0;
        core_reset <= 0;
        scores_start <= 0;
        load_end <= 0;
        parts_reset <= 0;
        sum_start <= 0;
        pages_start <= 0;
        window_start <= 0;
        cycles <= cycles + 1;
        if (item_taken) begin
            items_left <= items_left - 1;
            item <= item + 1'b1;
            lane <= lane_last ? 3'd0 : lane + 3'd1;
        end
        if (rst) begin
            state <= IDLE;
            listed <= NONE;
            write_status <= 0;
            write_choice <= 0;
            entries_started <= 0;
            broken_channels <= 0;
        end else case (state)
            IDLE: if (go) begin
                state <= CHECK;
                code <= ssdkv_fpga::STATUS_OK;
                place <= 0;
                job <= 0;
                cycles <= 0;
                beats_before <= all_beats;
                listed <= NONE;
                broken_channels <= 0;
            end
            CHECK: begin
                state <= wrong != 0 ? STOP : by_page ? DIVIDE : JOB;
                code <= wrong == 0 ? ssdkv_fpga::STATUS_OK : ssdkv_fpga::STATUS_ARGUMENT;
                place <= wrong;
                block_rest <= block_tokens;
            end
            DIVIDE: if (block_rest == 0) state <= JOB;
                else if (block_rest >= page_tokens) block_rest <= block_rest - page_tokens;
                else begin
                    state <= STOP;
                    code <= ssdkv_fpga::STATUS_ARGUMENT;
                    place <= 15;
                end
            JOB: if (job == job_count || failed) state <= STOP;
                else if (job[0]) state <= JOB_CHECK;
                else begin
                    state <= JOB_BEAT;
                    list_start <= 1;
                    reading <= 4;
                    list_address <= jobs[63:6] + {27'd0, job[31:1]};
                    list_beats <= 1;
                end
            JOB_BEAT: if (list_valid) begin
                state <= JOB_CHECK;
                job_beat <= list_data;
            end
            JOB_CHECK: if (failed) state <= STOP;
            else if (blocks_many || outside || too_long) begin
                state <= STOP;
                code <= outside ? ssdkv_fpga::STATUS_JOB_ENTRIES : ssdkv_fpga::STATUS_JOB_LENGTH;
                place <= job;
            end else if (list_idle) begin
                state <= QUERY;
                list_start <= 1;
                reading <= 0;
                list_address <= q_address;
                list_beats <= QUERY_BEATS;
            end
            QUERY: if (!list_start && list_idle) state <= CHOOSE;
            CHOOSE: begin
                items_left <= blocks;
                if (choice_done) begin
                    state <= SCORE;
                    scores_start <= 1;
                    listed <= CHANNELS;
                    lane <= channels_from[5:3];
                    list_start <= blocks != 0;
                    reading <= 5;
                    list_address <= channels_from[63:6];
                    list_beats <= channels_to[63:6] - channels_from[63:6];
                end
            end
            SCORE: begin
                if (block_bad && !broken_channels) begin
                    broken_channels <= 1;
                    code <= ssdkv_fpga::STATUS_CHANNEL_ADDRESS;
                    place <= first_channels + blocks - items_left;
                end
                if (!scores_start && broken_channels && items_left == 0) state <= STOP;
                else if (!scores_start && !list_start && scores_done && list_idle && select_ready) begin
                    state <= WINDOW_QUERY;
                    listed <= NONE;
                    load_end <= !by_page;
                    list_start <= 1;
                    reading <= 0;
                    list_address <= q_address;
                    list_beats <= QUERY_BEATS;
                    list_first <= first_window;
                    list_count <= window_entries;
                    window_now <= 1;
                    last_list <= 1;
                end
            end
            WINDOW_QUERY: if (!list_start && list_idle) state <= WINDOW_KEYS;
            WINDOW_SCORE: begin
                scoring <= finish && !row_valid && !row_beat ? scoring - 7'd1 : 7'd112;
                if (broken) begin
                    state <= STOP;
                    code <= broken_code;
                    place <= first_window + broken_place;
                end else if (scoring == 0) begin
                    state <= SUM;
                    sum_start <= 1;
                    core_reset <= 1;
                    listed <= NONE;
                    entries_started <= 0;
                end
            end
            SUM: if (summed) begin
                state <= by_page ? PAGES_MASS : SELECT;
                pages_start <= by_page;
            end
            PAGES_MASS: if (paged) begin
                state <= SELECT;
                load_end <= 1;
            end
            SELECT: if (select_done) begin
                state <= by_page ? EXPAND : WEIGH;
                window_start <= !by_page;
            end
            EXPAND: if (!expand && !expanded) begin
                state <= WEIGH;
                window_start <= 1;
            end
            WEIGH: if (weighed && !window_start) begin
                state <= context_pages == 0 ? SAY : MASKS;
                mask_at <= 0;
            end
            MASKS: begin
                state <= MASKS_SENT;
                write_start <= 1;
                written <= 8;
                write_address <= {masks_address[63:6], 6'd0};
                write_beats <= ({28'd0, masks_offset} + context_pages + 15) >> 4;
                mask_lane <= masks_offset;
                mask_beat <= 0;
                mask_strobe <= 0;
                mask_put <= 0;
                mask_full <= 0;
                mask_coming <= 0;
            end
            // A mask in two cycles: it is read, and put into its lane.
            MASKS_SENT: if (mask_sent) begin
                mask_full <= 0;
                mask_beat <= 0;
                mask_strobe <= 0;
                if (mask_put == context_pages) state <= SAY;
            end else if (!mask_full) begin
                mask_coming <= !mask_coming;
                if (mask_coming) begin
                    mask_beat[32*mask_lane +: 32] <= {16'd0, mask_read};
                    mask_strobe[4*mask_lane +: 4] <= 4'hf;
                    mask_lane <= mask_lane + 4'd1;
                    mask_put <= mask_put + 1'b1;
                    mask_at <= mask_at + 1'b1;
                    mask_full <= mask_lane == 15 || mask_put + 1'b1 == context_pages;
                end
            end
            SAY: if (writer_idle) begin
                state <= SAID;
                write_start <= 1;
                write_choice <= 1;
                choice_half <= 0;
                written <= 9;
                write_address <= choices + {25'd0, job_out, 7'd0};
                write_beats <= 2;
                list_first <= first_entry;
                list_count <= context_pages;
            end
            SAID: begin
                if (write_ready) choice_half <= 1;
                if (!write_start && writer_idle) begin
                    write_choice <= 0;
                    state <= attends ? QUERY_AGAIN : NEXT;
                    window_now <= 0;
                    last_list <= !with_window;
                    list_start <= attends;
                    reading <= 0;
                    list_address <= q_address;
                    list_beats <= QUERY_BEATS;
                end
            end
            QUERY_AGAIN: if (!list_start && list_idle) begin
                state <= with_mean ? MEAN : ENTRIES;
                list_start <= with_mean;
                reading <= 6;
                list_address <= mean_value[63:6] + times(job_out, 2 * NB);
                list_beats <= 2 * NB;
            end
            MEAN: if (!list_start && list_idle) state <= ENTRIES;
            ENTRIES, WINDOW, WINDOW_KEYS: if (list_idle && !list_start) begin
                state <= state == WINDOW_KEYS ? WINDOW_SCORE : RUN;
                scoring <= 7'd112;
                entries_started <= 1;
                listed <= PAGES;
                item <= 0;
                items_left <= list_count;
                lane <= {1'b0, list_first[1:0]};
                list_start <= list_count != 0;
                reading <= 3;
                list_address <= entries[63:6] + {26'd0, list_first_beat};
                list_beats <= list_end_beat - list_first_beat;
            end
            RUN: if (broken) begin
                state <= STOP;
                code <= broken_code;
                place <= window_now && broken_place >= context_pages
                    ? first_window + broken_place - context_pages : first_entry + broken_place;
            end else if (!last_list && items_left == 0 && !list_start && list_idle) begin
                state <= WINDOW;
                window_now <= 1;
                last_list <= 1;
                entries_started <= 0;
                listed <= NONE;
                list_first <= first_window;
                list_count <= window_entries;
            end else if (out_valid && writer_idle) begin
                state <= OUT;
                write_start <= 1;
                written <= 7;
                write_address <= out + times(job_out, 64 * PARTIAL_BEATS);
                write_beats <= PARTIAL_BEATS;
            end
            OUT: if (out_valid && out_ready && out_last) state <= NEXT;
            NEXT: begin
                state <= JOB;
                job <= job + 1;
                listed <= NONE;
                entries_started <= 0;
            end
            STOP: begin
                if (list_idle && quiet && scores_quiet && writer_idle) begin
                    state <= STATUS;
                    core_reset <= 1;
                    parts_reset <= 1;
                    if (failed) begin
                        code <= ssdkv_fpga::STATUS_MEMORY;
                        place <= failed_place;
                    end
                end
            end
            STATUS: begin
                state <= STATUS_WAIT;
                write_status <= 1;
                write_start <= 1;
                written <= 10;
                write_address <= status;
                write_beats <= 1;
            end
            STATUS_WAIT: if (!write_start && writer_idle) begin
                state <= IDLE;
                done <= 1;
                write_status <= 0;
                listed <= NONE;
                entries_started <= 0;
            end
            default: state <= IDLE;
        endcase
    end
endmodule
`default_nettype wire
